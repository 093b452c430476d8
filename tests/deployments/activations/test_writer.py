"""The writer: what it answers as stored is durable and told; what fails fails alone."""

from __future__ import annotations

import errno
import os
import resource
import threading

import pytest
import torch

from deployments.activations import read_run, runs
from deployments.activations.facts import SessionName, StoreError
from deployments.activations.segments.segments import is_sealed
from deployments.activations.writer import retention
from deployments.activations.writer.group_commit import Commits

POINT = "layers.0.output"
SESSION, OTHER = SessionName(None, "session"), SessionName(None, "other")
FSYNC = "deployments.activations.segments.segment_writer.os.fsync"


def files(root, session="_/session"):
    return sorted((root / session).iterdir())


def write(writer, *made):
    return [future.result() for future in [writer.submit(item.facts, item.batches) for item in made]]


@pytest.fixture
def most_bytes():
    """`most_bytes(n)`: no file may become longer, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda length: resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_runs_one_after_the_other_share_a_file_and_sessions_owners_and_schemas_have_their_own(
    make, open_writer, tmp_path
):
    writer = open_writer()
    stored = [write(writer, make(f"r{number}"))[0] for number in range(20)]
    [file] = files(tmp_path)
    assert [run.points[POINT].first_row for run in stored] == list(range(0, 60, 3))
    assert sum(run.bytes for run in stored) == file.stat().st_size
    write(
        writer,
        make("b", session_id="other"),
        make("b", owner="alice"),
        make("c", {POINT: torch.zeros(2, 9)}),
        make("d", {POINT: torch.zeros(3, 4, dtype=torch.bfloat16)}),
    )
    counts = {name: len(files(tmp_path, name)) for name in ("_/session", "_/other", "alice/session")}
    assert counts == {"_/session": 3, "_/other": 1, "alice/session": 1}


def test_full_idle_and_too_many_segments_are_sealed(make, open_writer, settle, tmp_path):
    writer = open_writer(segment_bytes=5000)
    write(writer, *(make(f"r{number}") for number in range(10)))
    settle(writer)
    *full, _ = [is_sealed(path) for path in files(tmp_path)]
    assert len(full) > 1
    assert all(full)
    assert all(path.stat().st_size < 10_000 for path in files(tmp_path))
    assert len(runs(tmp_path / "_/session")) == 10
    writer = open_writer(open_segments=2)
    for number, session in enumerate(["a", "b", "a", "c"]):
        write(writer, make(f"r{number}", session_id=session))
    settle(writer)
    assert [is_sealed(files(tmp_path, f"_/{session}")[0]) for session in "abc"] == [False, True, False]
    writer = open_writer(idle_s=0)
    write(writer, make("r", session_id="idle"))
    settle(writer)
    assert is_sealed(files(tmp_path, "_/idle")[0])


def test_a_full_disk_fails_the_run_that_does_not_fit_alone(make, open_writer, tmp_path, most_bytes):
    writer = open_writer()
    write(writer, make("before"))
    [path] = files(tmp_path)
    length = path.stat().st_size
    big = make("big", {POINT: torch.zeros(30_000, 4)}, parts=3)
    most_bytes(400_000)  # the third batch is torn
    good, bad = writer.submit(*make("beside", session_id="other")[:2]), writer.submit(*big[:2])
    assert good.result().run_id == "beside"
    with pytest.raises(StoreError, match="limit on file sizes"):
        bad.result()
    most_bytes(resource.RLIM_INFINITY)
    assert path.stat().st_size == length
    write(writer, make("after"), big)
    assert [run.run_id for run in runs(tmp_path / "_/session")] == ["before", "after", "big"]


def test_nothing_is_written_or_deleted_through_a_link_or_outside_of_the_root(
    make, open_writer, tmp_path, tmp_path_factory
):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "precious").touch()
    (tmp_path / "_").mkdir()
    (tmp_path / "_/session").symlink_to(outside)
    (tmp_path / "alice").symlink_to(outside)
    writer = open_writer()
    for made in (make("r"), make("r", owner="alice")):
        with pytest.raises(StoreError, match="remove"):
            write(writer, made)
        writer.delete(made.facts.session).result()
    for session_id in ("..", "../outside", "/etc", ".deleted-1", "a/b", ""):
        with pytest.raises(StoreError, match="session_id"):
            writer.submit(*make("r", session_id=session_id)[:2])
        with pytest.raises(StoreError, match="session_id"):
            writer.delete(SessionName(None, session_id))
    assert [path.name for path in outside.iterdir()] == ["precious"]


def test_a_deleted_session_is_gone_while_its_files_are_removed_and_may_begin_anew(
    make, open_writer, tmp_path, monkeypatch
):
    writer, gate, real = open_writer(), threading.Event(), retention.remove_folder
    write(writer, make("r"), make("kept", session_id="other"))
    reading = read_run(tmp_path / "_/session", "r")
    monkeypatch.setattr(retention, "remove_folder", lambda trash: gate.wait() and real(trash))
    deleted = writer.delete(SESSION)
    write(writer, make("again"))
    assert not deleted.done()
    gate.set()
    assert deleted.result() is True
    assert reading[POINT].shape == (3, 4)
    assert sorted(run["run_id"] for run in writer._index.runs()) == ["again", "kept"]
    assert [run.run_id for run in runs(tmp_path / "_/session")] == ["again"]
    assert writer.delete(SESSION).result() is True
    assert writer.delete(SESSION).result() is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_"]


def test_runs_are_answered_once_files_and_names_are_durable_and_the_index_was_told(
    make, open_writer, tmp_path, monkeypatch
):
    writer, synced, fsync, gate, said = open_writer(), [], os.fsync, threading.Event(), []

    def seen(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        gate.wait()
        fsync(descriptor)

    monkeypatch.setattr(FSYNC, seen)
    first = writer.submit(*make("first", session_id="s0")[:2])  # its group is held up, so that the next ones are one
    others = [writer.submit(*make(f"r{n}", session_id=f"s{n}")[:2]) for n in range(1, 20)]
    for future in (first, *others):
        future.add_done_callback(lambda done: said.append(writer._index.find(done.result().run_id) is not None))
    writer.abandon(SESSION, "nothing").result()  # behind them
    assert not any(future.done() for future in (first, *others))
    assert writer._index.runs() == []
    gate.set()
    for future in (first, *others):
        future.result()
    writer.abandon(SESSION, "nothing").result()
    assert said == [True] * 20
    assert {str(tmp_path / f"_/s{number}") for number in range(20)} <= set(synced)
    assert {path for path in synced if path.endswith(".arrow")} == {str(path) for path in tmp_path.glob("_/*/*.arrow")}
    assert synced.count(str(tmp_path)) <= 3  # once for each group


def test_an_fsync_that_is_refused_fails_what_it_was_to_make_durable_and_no_other_file(
    make, open_writer, tmp_path, monkeypatch
):
    writer, fsync = open_writer(), os.fsync
    write(writer, make("before"), make("before", session_id="other"))

    def refused(descriptor):
        if "/other/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(FSYNC, refused)
    good, bad = writer.submit(*make("r")[:2]), writer.submit(*make("r", session_id="other")[:2])
    assert good.result().run_id == "r"
    with pytest.raises(StoreError, match="Input/output error"):
        bad.result()
    monkeypatch.undo()
    write(writer, make("after", session_id="other"))
    for folder, expected in (("session", ["before", "r"]), ("other", ["after", "before"])):
        assert sorted(run.run_id for run in runs(tmp_path / "_" / folder)) == expected
        listed = writer._index.session(SessionName(None, folder))["runs"]
        assert sorted(run["run_id"] for run in listed) == expected


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_refuses_runs_and_nothing_of_them_is_listed(
    make, open_writer, tmp_path, monkeypatch, code
):
    def flock(*args):
        raise OSError(code, os.strerror(code))

    writer = open_writer()
    with monkeypatch.context() as patched:
        patched.setattr("deployments.activations.files.disk.fcntl.flock", flock)
        with pytest.raises(StoreError, match="mount the file system with locks"):
            write(writer, make("r"))
    assert writer._index.sessions() == list((tmp_path / "_/session").iterdir()) == []
    write(writer, make("r"))
    assert [run.run_id for run in runs(tmp_path / "_/session")] == ["r"]


def test_a_fault_of_the_writer_is_told_to_its_process_and_answers_nothing(make, open_writer, monkeypatch):
    failed = threading.Event()
    writer = open_writer(on_failure=failed.set)
    with monkeypatch.context() as patched:
        patched.setattr(Commits, "end", lambda *args: 1 / 0)
        stored = writer.submit(*make("r")[:2])
        assert failed.wait(60)
    assert not stored.done()
