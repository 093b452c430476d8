"""Runs in chunks when something fails: the disk, the process, or another run in the same file."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from queue import SimpleQueue

import pyarrow as pa
import pytest
import torch

import deployments.activations
from deployments.activations import load, runs
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import StoreError
from deployments.activations.segments.batches import batches_of
from deployments.activations.segments.segments import is_sealed

POINT = "layers.0.output"
REPOSITORY = Path(deployments.activations.__file__).parents[2]


def test_a_part_that_the_disk_refuses_fails_its_run_alone(make, open_sender):
    sender = open_sender()
    sender.finish(make("before"))
    [path] = sender.files()
    length = path.stat().st_size
    big = make("big", {POINT: torch.zeros(30_000, 4)}, parts=3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    try:
        sender.append(big, 0)
        with pytest.raises(StoreError, match="limit on file sizes"):
            sender.append(big, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == length
    for late in (lambda: sender.append(big, 1), lambda: sender.finish(big, 2)):
        with pytest.raises(StoreError, match="limit on file sizes"):
            late()
    sender.finish(make("after"))
    assert sender.listed() == ["after", "before"]


def test_a_failed_fsync_fails_all_that_it_was_to_make_durable(make, long, open_sender, monkeypatch):
    sender, entered, go_on = open_sender(), threading.Event(), threading.Event()
    sender.finish(make("before"))

    def fsync(descriptor):
        """Hold the first commit until there is work for the next, and refuse that one."""
        if go_on.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        entered.set()
        go_on.wait()

    monkeypatch.setattr("deployments.activations.segments.segment_writer.os.fsync", fsync)
    kept = sender.writer.submit(*make("kept")[:2])
    entered.wait()
    short = sender.writer.submit(*make("short")[:2])
    first = sender.writer.append("session", "long", 0, [long.batches[0]])
    go_on.set()
    assert kept.result().run_id == "kept"
    first.result()
    with pytest.raises(StoreError, match="Input/output error"):
        short.result()
    for late in (lambda: sender.append(long, 1), lambda: sender.finish(long, 1)):
        with pytest.raises(StoreError, match="Input/output error"):
            late()
    monkeypatch.undo()
    sender.finish(make("after"))
    assert sender.listed() == ["after", "before", "kept"]


def test_what_a_long_run_has_written_is_made_durable_on_the_way(make, long, open_sender, monkeypatch):
    sender, synced, fsync = open_sender(), SimpleQueue[str](), os.fsync
    sender.append(long, 0)  # the file is made
    monkeypatch.setattr("deployments.activations.writer.writer._SYNC_BYTES", 1)

    def seen(descriptor):
        fsync(descriptor)
        synced.put(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr("deployments.activations.segments.segment_writer.os.fsync", seen)
    sender.append(long, 1)
    found = {synced.get(timeout=30) for _ in range(3)}
    [path] = sender.files()
    assert found == {str(sender.folder.parent), str(sender.folder), str(path)}


def test_closing_takes_away_what_was_not_finished(make, long, open_sender):
    sender = open_sender()
    sender.finish(make("stored"))
    sender.append(long, 0)
    sender.writer.close()
    [path] = sender.files()
    assert is_sealed(path)
    assert pa.ipc.open_file(str(path)).num_record_batches == 1


def test_a_reader_survives_that_a_run_is_cut_off_under_it(make, open_sender):
    sender = open_sender()
    sender.finish(make("first"))
    big = make("big", {POINT: torch.zeros(90_000, 4)}, parts=30)
    for part in range(29):
        sender.append(big, part)
    [path] = sender.files()
    reading = batches_of(path)
    for _ in range(6):
        next(reading)
    sender.abandon(big)
    assert list(reading) == []
    assert runs(path) == [make("first").facts]


class Memory(bytearray):
    """Bytes whose end can be watched."""


def test_no_batch_is_kept_once_it_is_written(make, open_sender, monkeypatch):
    sender, made, watched, alive = open_sender(), make("r", parts=3), [], []
    fsync = os.fsync

    def look(descriptor):
        alive.append(sum(item() is not None for item in watched))
        fsync(descriptor)

    def received(batch):
        """The batch over memory of its own, as it comes out of Ray's object store."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        memory = [Memory(buffer) for buffer in buffers]
        watched.extend(weakref.ref(item) for item in memory)
        return pickle.loads(pickled, buffers=memory)  # noqa: S301, it was pickled here

    for part in range(2):
        sender.writer.append("session", "r", part, [received(made.batches[part])]).result()
    monkeypatch.setattr("deployments.activations.segments.segment_writer.os.fsync", look)
    sender.writer.submit(made.facts, [received(made.batches[2])], 2).result()
    assert len(watched) > 10
    assert set(alive) == {0}


CRASHING = """
import sys, torch
from pathlib import Path
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import RunFacts, SegmentFacts
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.writer import Writer

writer = Writer(Path(sys.argv[1]), Catalogue(), segment_bytes=400_000)
segment = SegmentFacts("session", "model", None, "x", {}, {})

def rows(number, part):
    return to_batch(segment, run_id=f"r{number}", sample_id=None, positions=[part], token_ids=[0], prompt_tokens=1,
                    points={"p": torch.full((1, 512), float(number))})

for turn in range(10**9):
    numbers = range(turn * 4, turn * 4 + 4)
    for part in range(5):
        for future in [writer.append("session", f"r{number}", part, [rows(number, part)]) for number in numbers]:
            future.result()
    writer.abandon("session", f"r{numbers[-1]}")
    for number in numbers[:-1]:
        run = RunFacts(f"r{number}", "session", "model", 0.0, 1, 6)
        writer.submit(run, [rows(number, 5)], 5).result()
        print(run.run_id, flush=True)
"""


@pytest.mark.long  # test_killed kills writers, too
def test_every_run_finished_before_a_kill_reads_back_whole_and_no_other_is_listed(tmp_path):
    command = [sys.executable, "-c", CRASHING, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(100)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
    acknowledged = {line.strip() for line in lines if line.endswith("\n")}
    found = {run["run_id"] for run in Catalogue.copied(tmp_path).session("session")["runs"]}
    assert len(acknowledged) >= 100
    assert found >= acknowledged
    assert len(found - acknowledged) <= 1  # the one whose answer was on its way
    for run in found:
        assert torch.equal(load(tmp_path / "session", run)["p"], torch.full((6, 512), float(run[1:])))
