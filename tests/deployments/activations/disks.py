"""The writer on real disks that fail. Run by test_disks in a namespace where the tests may mount."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess

import pytest
import torch

from deployments.activations import read_run
from deployments.activations.facts import StoreError
from deployments.activations.files.disk import DiskCheck

POINT = "layers.0.output"
BYTES = 2 << 20


def run(*command):
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path, tmp_path_factory):
    """A small disk, mounted at `tmp_path`; where else it is reached."""
    behind = tmp_path_factory.mktemp("disk")
    run("mount", "-t", "tmpfs", "-o", f"size={BYTES}", "tmpfs", behind)
    run("mount", "--bind", behind, tmp_path)
    return behind


@pytest.fixture
def room(disk, tmp_path, monkeypatch):
    monkeypatch.setattr("deployments.activations.files.disk._EVERY_S", 0.0)
    room = DiskCheck(tmp_path)
    return lambda size: asyncio.run(room.check(size))


def fill(path):
    """Take all the room that there is."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


def assert_readable(tmp_path, *made):
    for item in made:
        assert torch.equal(read_run(tmp_path / "_/session", item.facts.run_id)[POINT], item.points[POINT])


def test_on_a_disk_that_others_have_filled_nothing_is_stored_until_there_is_room(
    make, disk, room, open_sender, tmp_path
):
    sender, before, after = open_sender(), make("before"), make("after", session_id="new")
    sender.finish(before)
    fill(tmp_path / "filler")
    for refused in (lambda: sender.finish(after), lambda: room(0)):
        with pytest.raises(StoreError, match="No space left.*free space on the disk"):
            refused()
    assert_readable(tmp_path, before)
    (tmp_path / "filler").unlink()
    room(0)
    sender.finish(after)
    assert torch.equal(read_run(tmp_path / "_/new", "after")[POINT], after.points[POINT])


def test_what_is_written_to_a_disk_that_was_taken_away_is_not_said_to_be_stored(make, disk, open_sender, tmp_path):
    sender, before, late, after = open_sender(), *map(make, ("before", "late", "after"))
    sender.finish(before)
    run("umount", "-l", tmp_path)
    with pytest.raises(StoreError, match="nothing is mounted there any more.*mount it again"):
        sender.finish(late)
    assert list(tmp_path.iterdir()) == []  # where it was mounted
    run("mount", "--bind", disk, tmp_path)
    sender.finish(after)
    assert sender.listed() == ["after", "before"]
    assert_readable(tmp_path, before, after)
