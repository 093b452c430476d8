from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import deployments.activations
from deployments.activations import load, runs
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import StoreError
from deployments.activations.limits import Retention
from deployments.activations.segments.segments import is_sealed
from deployments.activations.writer import retention

POINT = "layers.0.output"
REPOSITORY = Path(deployments.activations.__file__).parents[2]


def files(root, session="session"):
    return sorted((root / session).iterdir())


def write(writer, *made):
    return [future.result() for future in [writer.submit(item.facts, item.batches) for item in made]]


def test_runs_one_after_the_other_share_a_file(make, open_writer, tmp_path):
    writer = open_writer()
    stored = [write(writer, make(f"r{number}"))[0] for number in range(20)]
    assert len(files(tmp_path)) == 1
    assert [run.points[POINT].first_row for run in stored] == list(range(0, 60, 3))
    assert sum(run.bytes for run in stored) == files(tmp_path)[0].stat().st_size


def test_sessions_and_schemas_have_files_of_their_own(make, open_writer, tmp_path):
    write(
        open_writer(),
        make("a"),
        make("b", session_id="other"),
        make("c", {POINT: torch.zeros(2, 9)}),
        make("d", {POINT: torch.zeros(3, 4, dtype=torch.bfloat16)}),
    )
    assert (len(files(tmp_path)), len(files(tmp_path, "other"))) == (3, 1)


def test_a_full_segment_is_sealed_and_the_next_run_begins_another(make, open_writer, settle, tmp_path):
    writer = open_writer(segment_bytes=4000)
    write(writer, *(make(f"r{number}") for number in range(10)))
    settle(writer)
    *full, _ = sealed = [is_sealed(path) for path in files(tmp_path)]
    assert len(sealed) > 2
    assert all(full)
    assert all(path.stat().st_size < 8000 for path in files(tmp_path))
    assert len(runs(tmp_path / "session")) == 10


def test_the_longest_idle_segment_is_sealed_when_too_many_are_open(make, open_writer, settle, tmp_path):
    writer = open_writer(open_segments=2)
    for number, session in enumerate(["a", "b", "a", "c"]):
        write(writer, make(f"r{number}", session_id=session))
    settle(writer)
    assert [is_sealed(files(tmp_path, session)[0]) for session in "abc"] == [False, True, False]


def test_closing_seals_what_is_open_and_refuses_what_comes_later(make, open_writer, tmp_path):
    writer = open_writer()
    queued = writer.submit(*make("r")[:2])
    writer.close()
    assert queued.done()
    assert is_sealed(files(tmp_path)[0])
    with pytest.raises(StoreError, match="shutting down"):
        writer.submit(*make("s")[:2])


def test_a_later_writer_does_not_touch_the_files_of_an_earlier_one(make, open_writer, tmp_path):
    first, second = open_writer(), open_writer()
    write(first, make("a"))
    [path] = files(tmp_path)
    before = path.read_bytes()
    write(second, make("b"))
    assert path.read_bytes() == before
    assert len(files(tmp_path)) == 2


def test_a_full_disk_fails_the_run_and_the_store_works_again(make, open_writer, tmp_path):
    writer = open_writer()
    write(writer, make("before"))
    [path] = files(tmp_path)
    length = path.stat().st_size
    big = make("big", {POINT: torch.zeros(30_000, 4)}, parts=3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))  # the third batch is torn
    try:
        with pytest.raises(StoreError, match="limit on file sizes"):
            write(writer, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == length
    write(writer, make("after"), big)
    assert [run.run_id for run in runs(tmp_path / "session")] == ["before", "after", "big"]
    assert runs(path) == [make("before").facts]


@pytest.mark.parametrize("more", [1, 500, 1_000, 1_500, 2_000])
def test_no_part_of_a_run_that_failed_is_written_later(make, open_writer, tmp_path, more):
    writer = open_writer()
    write(writer, make("before", {POINT: torch.zeros(3, 200)}))
    [path] = files(tmp_path)
    length = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length + more, hard))
    try:
        with pytest.raises(StoreError, match="limit on file sizes"):
            write(writer, make("small", {POINT: torch.zeros(3, 200)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.close()
    assert path.stat().st_size == length


def test_a_run_beside_one_that_failed_is_kept(make, open_writer, tmp_path):
    writer = open_writer()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        good = writer.submit(*make("good")[:2])
        bad = writer.submit(*make("bad", {POINT: torch.zeros(30_000, 4)})[:2])
        assert good.result().run_id == "good"
        with pytest.raises(StoreError):
            bad.result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [run.run_id for run in runs(tmp_path / "session")] == ["good"]


def test_a_vanished_root_fails_the_run_until_it_is_back(make, open_writer, tmp_path):
    writer = open_writer()
    write(writer, make("a"))
    shutil.rmtree(tmp_path)
    with pytest.raises(StoreError, match="put the directory back"):
        write(writer, make("b"))
    with pytest.raises(StoreError, match="put the directory back"):
        write(writer, make("b"))
    tmp_path.mkdir()
    write(writer, make("b"))
    assert [run.run_id for run in runs(tmp_path / "session")] == ["b"]


def test_a_root_that_is_away_for_a_while_has_what_was_stored_and_takes_more(make, open_writer, tmp_path):
    writer, away = open_writer(), tmp_path.with_name("away")
    write(writer, make("a"))
    tmp_path.rename(away)
    with pytest.raises(StoreError, match="put the directory back"):
        write(writer, make("b"))
    with pytest.raises(StoreError, match="put the directory back"):
        write(writer, make("c"))
    away.rename(tmp_path)
    write(writer, make("d"))
    assert [run.run_id for run in runs(tmp_path / "session")] == ["a", "d"]


def test_nothing_is_written_or_deleted_through_a_link(make, open_writer, tmp_path, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "precious").touch()
    (tmp_path / "session").symlink_to(outside)
    writer = open_writer()
    with pytest.raises(StoreError, match="remove"):
        write(writer, make("r"))
    assert writer.delete("session").result() is False
    assert [path.name for path in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("session_id", ["..", "../outside", "/etc", ".deleted-1"])
def test_nothing_outside_the_root_can_be_named(make, open_writer, session_id):
    writer = open_writer()
    with pytest.raises(StoreError, match="session_id"):
        writer.submit(*make("r", session_id=session_id)[:2])
    with pytest.raises(StoreError, match="session_id"):
        writer.delete(session_id)


def test_what_does_not_belong_together_is_refused(make, open_writer):
    writer = open_writer()
    one, other = make("r"), make("r", session_id="other")
    for facts, batches, reason in [
        (one.facts, [], "no rows"),
        (one.facts, other.batches, "one session"),
        (one.facts, [*one.batches, *make("r", {POINT: torch.zeros(3, 5)}).batches], "differ"),
        (one.facts, [one.batches[0].replace_schema_metadata(None)], "schema"),
    ]:
        with pytest.raises(StoreError, match=reason):
            writer.submit(facts, batches)
    write(writer, one)
    with pytest.raises(StoreError, match="stored already"):
        write(writer, one)


def test_a_cancelled_run_is_not_written(make, open_writer, tmp_path):
    writer = open_writer()
    futures: list[Future] = [writer.submit(*make(f"r{number}")[:2]) for number in range(50)]
    cancelled = {f"r{number}" for number, future in enumerate(futures) if future.cancel()}
    writer.close()
    assert {run.run_id for run in runs(tmp_path / "session")} == {f"r{n}" for n in range(50)} - cancelled


def test_a_deleted_session_is_gone_and_may_begin_anew(make, open_writer, tmp_path):
    writer = open_writer()
    write(writer, make("r"), make("kept", session_id="other"))
    reading = load(tmp_path / "session", "r")
    assert writer.delete("session").result() is True
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["other"]
    assert reading[POINT].shape == (3, 4)
    assert writer.delete("session").result() is False
    write(writer, make("r"))
    assert len(runs(tmp_path / "session")) == 1


CRASHING = """
import sys, torch
from pathlib import Path
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import RunFacts, SegmentFacts
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.writer import Writer

writer = Writer(Path(sys.argv[1]), Catalogue(), segment_bytes=200_000)
segment = SegmentFacts("session", "model", None, "x", {}, {})
for number in range(10**9):
    run, futures = f"r{number}", []
    for k in range(4):
        run = f"r{number * 4 + k}"
        batches = [
            to_batch(segment, run_id=run, sample_id=None, positions=[part], token_ids=[0], prompt_tokens=1,
                     points={"p": torch.full((1, 512), float(number * 4 + k))})
            for part in range(3)
        ]
        futures.append((run, writer.submit(RunFacts(run, "session", "model", 0.0, 1, 3), batches)))
    for run, future in futures:
        future.result()
        print(run, flush=True)
"""


@pytest.mark.long  # test_killed kills writers, too
def test_every_run_acknowledged_before_a_kill_reads_back_whole(tmp_path):
    command = [sys.executable, "-c", CRASHING, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(150)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
    acknowledged = [line.strip() for line in lines if line.endswith("\n")]
    listed = {run["run_id"] for run in Catalogue.copied(tmp_path).session("session")["runs"]}
    assert len(acknowledged) >= 150
    assert listed.issuperset(acknowledged)
    for run in listed:
        assert torch.equal(load(tmp_path / "session", run)["p"], torch.full((3, 512), float(run[1:])))


def test_names_of_new_files_are_durable_before_their_runs_are_answered_and_not_made_so_one_by_one(
    make, open_writer, tmp_path, monkeypatch
):
    writer, synced, fsync, gate = open_writer(), [], os.fsync, threading.Event()

    def seen(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        gate.wait()
        fsync(descriptor)

    monkeypatch.setattr("deployments.activations.segments.segment_writer.os.fsync", seen)
    first = writer.submit(*make("first", session_id="s0")[:2])  # its group is held up, so that the next ones are one
    others = [writer.submit(*make(f"r{n}", session_id=f"s{n}")[:2]) for n in range(1, 20)]
    writer.ask(lambda manager: manager.check("s", 0)).result()
    assert not any(future.done() for future in (first, *others))
    gate.set()
    for future in (first, *others):
        future.result()
    assert {str(tmp_path / f"s{number}") for number in range(20)} <= set(synced)
    assert synced.count(str(tmp_path)) <= 3  # once for each group


def test_runs_are_stored_while_the_files_of_a_deleted_session_are_being_removed(make, open_writer, monkeypatch):
    writer, gate, real = open_writer(), threading.Event(), retention.remove_folder
    write(writer, make("old", session_id="old"))
    monkeypatch.setattr(retention, "remove_folder", lambda trash: gate.wait() and real(trash))
    deleted = writer.delete("old")
    write(writer, make("r"), make("again", session_id="old"))
    assert not deleted.done()
    gate.set()
    assert deleted.result() is True
    assert sorted(run["run_id"] for run in writer._catalogue.runs()) == ["again", "r"]


def test_an_abandoned_run_and_a_question_for_room_wait_for_no_commit(make, open_writer, monkeypatch):
    writer, gate, fsync = open_writer(), threading.Event(), os.fsync
    writer.retain(Retention(max_store_bytes=1 << 30)).result()
    long = make("long", {POINT: torch.randn(4, 4)}, parts=2, session_id="other")
    writer.append("other", "long", 0, [long.batches[0]]).result()
    monkeypatch.setattr(
        "deployments.activations.segments.segment_writer.os.fsync", lambda file: (gate.wait(), fsync(file))
    )
    stored = writer.submit(*make("r")[:2])
    writer.abandon("other", "long").result()
    assert writer.ask(lambda manager: manager.check("other", 1 << 20)).result() == []
    assert not stored.done()
    gate.set()
    assert stored.result().run_id == "r"
