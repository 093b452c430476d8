"""The writer on real disks that fail. Run by test_disks in a namespace where the tests may mount."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess

import pytest
import torch

from deployments.activations import load
from deployments.activations.facts import StoreError
from deployments.activations.writer.room import DiskCheck
from tests.waiting import until

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
    monkeypatch.setattr("deployments.activations.writer.room._EVERY_S", 0.0)
    room = DiskCheck(tmp_path)
    return lambda size: asyncio.run(room.check(size))


@pytest.fixture
def big(make):
    """A run that the disk has no room for, though it has for its first part."""
    return make("big", {POINT: torch.zeros(BYTES // 10, 1)}, parts=4)


def fill(path):
    """Take all the room that there is."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


def assert_readable(tmp_path, *made):
    for item in made:
        assert torch.equal(load(tmp_path / "session", item.facts.run_id)[POINT], item.points[POINT])


def test_a_full_disk_fails_what_does_not_fit_and_the_next_run_is_stored(make, big, disk, open_sender, tmp_path):
    sender, before, after = open_sender(), make("before"), make("after")
    sender.finish(before)
    with pytest.raises(StoreError, match="No space left.*free space on the disk"):
        sender.finish(big)
    assert_readable(tmp_path, before)
    sender.finish(after)
    assert sender.listed() == ["after", "before"]
    assert_readable(tmp_path, before, after)


def test_a_long_run_that_fills_the_disk_fails_and_gives_its_room_back(make, big, disk, open_sender, tmp_path):
    sender, before = open_sender(), make("before")
    sender.finish(before)
    free = os.statvfs(tmp_path).f_bavail
    sender.append(big, 0)
    with pytest.raises(StoreError, match="free space on the disk"):
        sender.append(big, 1)
    with pytest.raises(StoreError, match="free space on the disk"):
        sender.finish(big, 2)
    assert os.statvfs(tmp_path).f_bavail == free
    assert sender.listed() == ["before"]


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
    assert torch.equal(load(tmp_path / "new", "after")[POINT], after.points[POINT])


def test_less_room_than_a_run_may_take_is_known_before(room):
    room(BYTES // 2)
    with pytest.raises(StoreError, match=f"bytes are free, and up to {BYTES * 2} may be recorded.*free space"):
        room(BYTES * 2)


def test_a_disk_that_turns_read_only_fails_runs_until_it_is_writable(make, disk, room, open_sender, tmp_path):
    before, after = make("before"), make("after")
    # A disk with files open for writing, such as a catalogue's database, cannot be remounted.
    sender = open_sender(kept=False, idle_s=0)
    sender.finish(before)
    sender.settled()
    run("mount", "-o", "remount,ro", disk)
    for refused in (lambda: sender.finish(after), lambda: room(0)):
        with pytest.raises(StoreError, match="Read-only.*remount the file system"):
            refused()
    assert_readable(tmp_path, before)
    run("mount", "-o", "remount,rw", disk)
    room(0)
    sender.finish(after)
    assert_readable(tmp_path, before, after)


def test_what_is_written_to_a_disk_that_was_taken_away_is_not_said_to_be_stored(
    make, disk, room, open_sender, tmp_path
):
    sender, before, late, later, after = open_sender(), *map(make, ("before", "late", "later", "after"))
    sender.finish(before)
    run("umount", "-l", tmp_path)
    with pytest.raises(StoreError, match="put the directory back, or mount it again"):
        sender.finish(late)  # to a file that is open
    for refused in (lambda: sender.finish(later), lambda: room(0)):
        with pytest.raises(StoreError, match="nothing is mounted there any more.*mount it again"):
            refused()
    assert list(tmp_path.iterdir()) == []  # where it was mounted
    run("mount", "--bind", disk, tmp_path)
    room(0)
    sender.finish(after)
    assert sender.listed() == ["after", "before"]
    assert_readable(tmp_path, before, after)


def test_what_the_bucket_has_leaves_a_disk_that_is_full_and_is_fetched_once_there_is_room(
    make, disk, head, bucket, tmp_path
):
    one = head()
    made = make("r", {POINT: torch.randn(1000, 100)})
    one.archived(made)
    fill(tmp_path / "filler")
    until(lambda: one.run("r")["points"][POINT]["uri"].startswith("s3:"))
    until(lambda: not list((one.root / "session").iterdir()))
    uri = one.run("r")["points"][POINT]["uri"]
    assert not one.archive.cache.restore([uri])
    assert torch.equal(load(bucket.uri("session"), "r", verify=True)[POINT], made.points[POINT])
    (tmp_path / "filler").unlink()
    assert one.archive.cache.restore([uri])
    assert_readable(one.root, made)
