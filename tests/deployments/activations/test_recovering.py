"""A store that starts repairs what a killed one left, and touches nothing else."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from deployments.activations import runs
from deployments.activations.files.disk import create, directory
from deployments.activations.index.index import Index
from deployments.activations.segments.segments import whole_runs
from deployments.activations.segments.verify import verify
from deployments.activations.writer.recovery import DAMAGED, recover
from tests.waiting import until

POINT = "layers.0.output"
NAME = "20000101T000000-00000000-000001.arrow"  # as a writer would choose it


@pytest.fixture
def left_files(make, long, open_sender):
    """A session's files as a killed writer leaves them: two runs and a beginning in one, a beginning in another."""
    sender = open_sender()
    for name in ("a", "b"):
        sender.finish(make(name))
    sender.append(long, 0)
    sender.append(make("other", {POINT: torch.randn(6, 9)}, parts=3), 0)
    files = {path: path.read_bytes() for path in sender.files()}
    sender.writer.close()
    for path, data in files.items():
        path.unlink(missing_ok=True)
        path.write_bytes(data)
    return sorted(files)


def test_a_file_that_a_writer_left_beside_one_that_runs_is_sealed_too(left_files, open_sender, monkeypatch):
    monkeypatch.setattr("deployments.activations.writer.writer._LOOK_S", 0.02)
    kept, data = left_files[0], left_files[0].read_bytes()
    index = open_sender().writer._index
    kept.unlink()
    other = kept.with_name(NAME)
    other.write_bytes(data)  # as a killed writer of another node left it
    index.look()
    until(lambda: not index.unsealed())
    assert verify(other).state == "whole"
    assert [run["run_id"] for run in index.runs()] == ["a", "b"]


def test_a_file_cut_at_any_byte_keeps_the_runs_before_it(left_files, tmp_path):
    kept, _ = left_files
    data, ends, end = kept.read_bytes(), [], 0
    for run in whole_runs(kept):
        ends.append(end := end + run.bytes)
    recover(tmp_path)
    sealed = kept.read_bytes()
    for whole in (data, sealed):
        for length in {*range(0, len(whole), 83), *ends, len(whole) - 1}:
            kept.write_bytes(whole[:length])
            assert [run.run_id for run in runs(kept)] == ["a", "b"][: sum(end <= length for end in ends)]
            recover(tmp_path)
            expected = ["a", "b"][: sum(end <= length for end in ends)]
            assert kept.exists() == bool(expected)
            if expected:
                assert [run.run_id for run in runs(kept)] == expected
                assert verify(kept).state == "whole"
                assert expected != ["a", "b"] or kept.read_bytes() == sealed
            for damaged in kept.parent.glob(f"*{DAMAGED}*"):
                assert damaged.read_bytes() == whole[:length]
                damaged.unlink()


def test_what_a_writer_holds_is_left_to_it(make, long, open_sender, tmp_path):
    sender, over = open_sender(segment_bytes=1), threading.Event()
    sender.append(long, 0)
    held = {path: path.read_bytes() for path in sender.files()}

    def start_again_and_again():
        while not over.is_set():
            recover(tmp_path)

    with ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(start_again_and_again) for _ in range(2)]
        made = [make(f"r{number:02}") for number in range(40)]
        for item in made:
            sender.finish(item)
        over.set()
        for start in starting:
            start.result()
    assert {path: path.read_bytes() for path in held} == held
    sender.append(long, 1)
    sender.finish(long, 2)
    assert sender.listed() == ["long", *(item.facts.run_id for item in made)]
    assert len(sender.files()) == 41


def test_what_was_on_its_way_in_or_out_is_removed_unless_somebody_holds_it(tmp_path):
    (tmp_path / ".deleted-1").mkdir()
    (tmp_path / ".deleted-1" / "x.arrow").touch()
    (tmp_path / ".new-1").touch()
    with directory(tmp_path) as top:
        file = create(".new-going-on", top)
        recover(tmp_path).join()
        os.close(file)
    assert {path.name for path in tmp_path.iterdir()} == {".new-going-on"}
    recover(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_damaged_rather_than_cut_off_is_kept_beside_the_file_before_that_is_sealed(make, open_sender, caplog):
    sender = open_sender(idle_s=3600)
    for i in range(6):
        sender.finish(make(f"r{i}", {"p": torch.randn(50, 30)}))
    [path] = sender.files()
    data = path.read_bytes()  # a server that ends now leaves this
    ends, root = [run.offset + run.bytes for run in whole_runs(path)], path.parents[2]
    for name, at, left in (
        ("framing", ends[1] + 8, ["r0", "r1"]),
        ("schema", 20, []),
        ("value", ends[2] - 900, ["r0", "r1", "r3", "r4", "r5"]),
    ):
        copy = root / name / "_/session" / path.name
        copy.parent.mkdir(parents=True)
        broken = bytearray(data)
        broken[at : at + 4] = b"\xff\xff\xff\x7f"
        copy.write_bytes(broken)
        if name == "value":
            os.link(copy, f"{copy}{DAMAGED}")  # a start before this one was killed here
        for _ in range(2):
            recover(root / name)
            assert [run.run_id for run in runs(copy)] == left if left else not copy.exists()
            assert [item.read_bytes() for item in copy.parent.glob(f"*{DAMAGED}")] == [broken]
        assert "is kept as" in caplog.text
        with closing(Index.scanned(root / name)) as index:
            assert [run["run_id"] for run in index.runs()] == left
