"""Runs that reach the store while they are still being generated."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pyarrow as pa
import pytest
import torch

import deployments.activations
from deployments.activations import load, runs
from deployments.activations.catalogue import Catalogue
from deployments.activations.facts import StoreError
from deployments.activations.reader import is_sealed, whole_runs

POINT = "layers.0.output"
REPOSITORY = Path(deployments.activations.__file__).parents[2]


def files(root, session="session"):
    return sorted((root / session).iterdir())


def listed(root, session="session"):
    return sorted(run.run_id for run in runs(root / session))


def append(writer, made, part):
    return writer.append(made.facts.session_id, made.facts.run_id, part, [made.batches[part]]).result()


def finish(writer, made, part=0):
    return writer.submit(made.facts, made.batches[part:], part).result()


def abandon(writer, made):
    return writer.abandon(made.facts.session_id, made.facts.run_id).result()


@pytest.fixture
def long(make):
    """A run of three batches of two rows."""
    return make("long", {POINT: torch.randn(6, 4)}, parts=3)


def test_a_run_is_listed_once_its_last_part_is_there(long, open_writer, tmp_path):
    writer = open_writer()
    for part in range(2):
        append(writer, long, part)
        assert (listed(tmp_path), Catalogue.rebuild(tmp_path).sessions()) == ([], [])
    stored = finish(writer, long, 2)
    assert stored.points[POINT][1:] == (0, (6, 4), "float32")
    assert stored.bytes == files(tmp_path)[0].stat().st_size
    run = load(tmp_path / "session", "long")
    assert torch.equal(run[POINT], long.points[POINT])
    assert (run.facts, run.positions.tolist()) == (long.facts, list(range(6)))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_run_may_end_without_more_rows(make, open_writer, tmp_path, parts):
    writer, made = open_writer(), make("r", parts=parts)
    for part in range(parts):
        append(writer, made, part)
    finish(writer, made, parts)
    for _ in ("open", "sealed"):
        assert torch.equal(load(tmp_path / "session")[POINT], made.points[POINT])
        writer.close()
    assert pa.ipc.open_file(str(files(tmp_path)[0])).read_all().num_rows == 3


def test_short_runs_beside_a_long_one_share_another_file(make, long, open_writer, tmp_path):
    writer = open_writer()
    finish(writer, make("before"))
    for part in range(2):
        append(writer, long, part)
        finish(writer, make(f"beside-{part}"))
    stored = finish(writer, long, 2)
    finish(writer, make("after"))
    assert len(files(tmp_path)) == 2
    assert stored.points[POINT].first_row == 3  # behind the run that was there before
    assert listed(tmp_path) == ["after", "before", "beside-0", "beside-1", "long"]


def test_the_files_are_as_many_as_the_long_runs_at_one_time(make, open_writer, tmp_path):
    writer = open_writer()
    for turn in range(5):
        made = [make(f"r{turn}-{number}", parts=3) for number in range(4)]
        for part in range(2):
            for item in made:
                append(writer, item, part)
        abandon(writer, made.pop(turn % 4))
        for item in made:
            finish(writer, item, 2)
    assert len(files(tmp_path)) <= 4
    assert len(listed(tmp_path)) == 15


def test_a_long_run_is_never_split_and_its_full_file_is_sealed(make, open_writer, tmp_path):
    writer = open_writer(shard_bytes=2000)
    made = make("r", {POINT: torch.randn(400, 4)}, parts=10)
    for part in range(9):
        append(writer, made, part)
    [path] = files(tmp_path)
    assert not is_sealed(path)
    finish(writer, made, 9)
    writer.delete("nothing").result()  # behind the round that sealed
    assert is_sealed(path)
    assert torch.equal(load(path)[POINT], made.points[POINT])


def test_only_shards_that_no_run_is_using_are_sealed_when_idle_or_too_many(make, long, open_writer, tmp_path):
    writer = open_writer(idle_s=0, open_shards=1)
    append(writer, long, 0)
    [used] = files(tmp_path)
    finish(writer, make("short"))
    writer.delete("nothing").result()  # behind the round that sealed
    assert [is_sealed(path) for path in files(tmp_path) if path != used] == [True]
    append(writer, long, 1)
    assert finish(writer, long, 2).points[POINT].uri == used.as_uri()


def test_an_abandoned_run_leaves_nothing_and_its_file_goes_on(make, long, open_writer, tmp_path):
    writer = open_writer()
    finish(writer, make("before"))
    [path] = files(tmp_path)
    before = path.read_bytes()
    append(writer, long, 0)
    assert len(path.read_bytes()) > len(before)
    abandon(writer, long)
    assert path.read_bytes() == before
    with pytest.raises(StoreError, match="abandoned"):
        append(writer, long, 1)
    finish(writer, make("after"))
    writer.close()
    assert pa.ipc.open_file(str(path)).read_all()["run_id"].unique().to_pylist() == ["before", "after"]
    assert listed(tmp_path) == ["after", "before"]


def test_a_file_whose_only_run_is_abandoned_is_removed(long, open_writer, tmp_path):
    writer = open_writer()
    append(writer, long, 0)
    abandon(writer, long)
    assert files(tmp_path) == []


def test_abandoning_what_is_stored_or_unknown_changes_nothing(make, open_writer, tmp_path):
    writer, made = open_writer(), make("r")
    finish(writer, made)
    abandon(writer, made)
    abandon(writer, make("unknown", session_id="other"))
    assert listed(tmp_path) == ["r"]


def test_a_part_that_comes_behind_the_end_of_its_run_is_refused(long, open_writer, tmp_path):
    writer = open_writer()
    abandon(writer, long)  # overtook the first part
    with pytest.raises(StoreError, match="abandoned"):
        append(writer, long, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_nothing_comes_of_is_given_up(long, open_writer, tmp_path):
    writer = open_writer(lease_s=0)
    append(writer, long, 0)
    with pytest.raises(StoreError, match="given up: nothing came"):
        append(writer, long, 1)
    assert files(tmp_path) == []


def test_deleting_a_session_ends_its_open_runs(make, long, open_writer, tmp_path):
    writer = open_writer()
    finish(writer, make("stored"))
    append(writer, long, 0)
    assert writer.delete("session").result()
    assert list(tmp_path.iterdir()) == []
    for late in (lambda: append(writer, long, 1), lambda: finish(writer, long, 1)):
        with pytest.raises(StoreError, match="session was deleted"):
            late()


def test_a_store_that_was_started_again_refuses_the_rest_of_a_run(long, open_writer, tmp_path):
    append(open_writer(), long, 0)
    writer = open_writer()
    for late in (lambda: append(writer, long, 1), lambda: finish(writer, long, 1)):
        with pytest.raises(StoreError, match="those before it are not here"):
            late()
    finish(writer, long)
    assert listed(tmp_path) == ["long"]


def test_parts_out_of_order_and_ids_in_use_are_refused_and_harm_nothing(long, open_writer, tmp_path):
    writer = open_writer()
    append(writer, long, 0)
    for wrong, reason in [
        (lambda: append(writer, long, 2), "where 1 was to come"),
        (lambda: append(writer, long, 0), "another id"),
        (lambda: finish(writer, long), "another id"),
    ]:
        with pytest.raises(StoreError, match=reason):
            wrong()
    append(writer, long, 1)
    finish(writer, long, 2)
    assert torch.equal(load(tmp_path / "session")[POINT], long.points[POINT])
    with pytest.raises(StoreError, match="stored already"):
        append(writer, long, 0)


def test_parts_that_do_not_fit_together_are_refused(make, long, open_writer):
    writer = open_writer()
    append(writer, long, 0)
    other = make("long", {POINT: torch.zeros(2, 5)})
    with pytest.raises(StoreError, match="differ in points"):
        writer.append("session", "long", 1, other.batches).result()
    with pytest.raises(StoreError, match="no rows"):
        writer.append("session", "long", 1, [])
    with pytest.raises(StoreError, match="one session"):
        writer.append("other", "long", 0, long.batches)


def test_a_part_that_the_disk_refuses_fails_its_run_alone(make, open_writer, tmp_path):
    writer = open_writer()
    finish(writer, make("before"))
    [path] = files(tmp_path)
    length = path.stat().st_size
    big = make("big", {POINT: torch.zeros(30_000, 4)}, parts=3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        append(writer, big, 0)
        with pytest.raises(StoreError, match="limit on file sizes"):
            append(writer, big, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == length
    for late in (lambda: append(writer, big, 1), lambda: finish(writer, big, 2)):
        with pytest.raises(StoreError, match="limit on file sizes"):
            late()
    finish(writer, make("after"))
    assert listed(tmp_path) == ["after", "before"]


def test_a_failed_fsync_fails_all_that_it_was_to_make_durable(make, long, open_writer, tmp_path, monkeypatch):
    writer, entered, go_on = open_writer(), threading.Event(), threading.Event()
    finish(writer, make("before"))

    def fsync(descriptor):
        """Hold the first commit until there is work for the next, and refuse that one."""
        if go_on.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        entered.set()
        go_on.wait()

    monkeypatch.setattr("deployments.activations.shard.os.fsync", fsync)
    kept = writer.submit(*make("kept")[:2])
    entered.wait()
    short = writer.submit(*make("short")[:2])
    first = writer.append("session", "long", 0, [long.batches[0]])
    go_on.set()
    assert kept.result().run_id == "kept"
    first.result()
    with pytest.raises(StoreError, match="Input/output error"):
        short.result()
    for late in (lambda: append(writer, long, 1), lambda: finish(writer, long, 1)):
        with pytest.raises(StoreError, match="Input/output error"):
            late()
    monkeypatch.undo()
    finish(writer, make("after"))
    assert listed(tmp_path) == ["after", "before", "kept"]


def test_closing_takes_away_what_was_not_finished(make, long, open_writer, tmp_path):
    writer = open_writer()
    finish(writer, make("stored"))
    append(writer, long, 0)
    writer.close()
    [path] = files(tmp_path)
    assert is_sealed(path)
    assert pa.ipc.open_file(str(path)).num_record_batches == 1


def test_a_reader_survives_that_a_run_is_cut_off_under_it(make, open_writer, tmp_path):
    writer = open_writer()
    finish(writer, make("first"))
    finish(writer, make("second"))
    big = make("big", {POINT: torch.zeros(90_000, 4)}, parts=30)
    for part in range(29):
        append(writer, big, part)
    [path] = files(tmp_path)
    reading = whole_runs(path)
    assert next(reading).facts.run_id == "first"
    abandon(writer, big)
    assert [run.facts.run_id for run in reading] == ["second"]


class Memory(bytearray):
    """Bytes whose end can be watched."""


def test_no_batch_is_kept_once_it_is_written(make, open_writer):
    writer, made, watched = open_writer(), make("r", parts=3), []

    def received(batch):
        """The batch over memory of its own, as it comes out of Ray's object store."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        memory = [Memory(buffer) for buffer in buffers]
        watched.extend(weakref.ref(item) for item in memory)
        return pickle.loads(pickled, buffers=memory)  # noqa: S301, it was pickled here

    for part in range(2):
        writer.append("session", "r", part, [received(made.batches[part])]).result()
    writer.submit(made.facts, [received(made.batches[2])], 2).result()
    gc.collect()
    assert len(watched) > 10
    assert not any(item() is not None for item in watched)


CRASHING = """
import sys, torch
from pathlib import Path
from deployments.activations.catalogue import Catalogue
from deployments.activations.facts import RunFacts, ShardFacts
from deployments.activations.schema import to_batch
from deployments.activations.writer import Writer

writer = Writer(Path(sys.argv[1]), Catalogue(), shard_bytes=400_000)
shard = ShardFacts("session", "model", None, "x", {}, {})

def rows(number, part):
    return to_batch(shard, run_id=f"r{number}", sample_id=None, positions=[part], token_ids=[0], prompt_tokens=1,
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


def test_every_run_finished_before_a_kill_reads_back_whole_and_no_other_is_listed(tmp_path):
    command = [sys.executable, "-c", CRASHING, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(100)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
    acknowledged = {line.strip() for line in lines if line.endswith("\n")}
    found = {run["run_id"] for run in Catalogue.rebuild(tmp_path).session("session")["runs"]}
    assert len(acknowledged) >= 100
    assert found >= acknowledged
    assert len(found - acknowledged) <= 1  # the one whose answer was on its way
    for run in found:
        assert torch.equal(load(tmp_path / "session", run)["p"], torch.full((6, 512), float(run[1:])))
