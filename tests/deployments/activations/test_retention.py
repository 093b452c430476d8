"""Quotas reject only what exceeds them, age and pins decide which sessions are deleted, and readers keep open files."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.activations import load, runs
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.export.downloads import Readings
from deployments.activations.facts import StoreError, names_a_session
from deployments.activations.filters import Choice
from deployments.activations.limits import Retention, SessionSize, first_of
from deployments.activations.reader.training import ActivationRows
from deployments.activations.state.state import Pins, save_limits, saved_limits
from deployments.activations.writer.recovery import recover
from deployments.activations.writer.retention import SessionManager
from deployments.activations.writer.writer import Writer
from deployments.errors import RequestError

POINT = "layers.0.output"
RUN = 64 << 10  # about what a run of `big` takes


@pytest.fixture
def big(make):
    """`big(run, session, created)`: a run of 64 KiB in four parts."""

    def made(run, session="session", created=1.0):
        return make(run, {POINT: torch.randn(64, 256)}, session_id=session, parts=4, created=created)

    return made


@pytest.fixture
def keep(open_writer):
    """`keep(**limits)`: a writer that keeps to them."""

    def opened(**limits):
        writer = open_writer()
        writer.retain(Retention(**limits)).result()
        return writer

    return opened


def store(writer, *made):
    for one in made:
        writer.submit(one.facts, one.batches).result()


def sessions(root):
    return sorted(item.name for item in root.iterdir() if names_a_session(item.name))


def test_a_session_at_its_quota_takes_no_more_and_others_do(keep, big, tmp_path):
    writer = keep(max_session_bytes=2 * RUN + RUN // 2)
    store(writer, big("a"), big("b"))
    with pytest.raises(StoreError, match=r"quota of session session .*\d+ of 163840 bytes.*max_session_bytes"):
        store(writer, big("c"))
    store(writer, big("c", "other"))
    assert [run.run_id for run in runs(tmp_path / "session")] == ["a", "b"]


def test_a_store_at_its_quota_deletes_nothing_and_has_room_once_something_is_deleted(keep, big, tmp_path):
    writer = keep(max_store_bytes=2 * RUN + RUN // 2)
    store(writer, big("a", "one"), big("b", "two"))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"store's quota .*delete sessions .*max_store_bytes"):
            store(writer, big("c"))
        with pytest.raises(StoreError, match="store's quota"):
            writer.ask(lambda manager: manager.check("three", RUN)).result()
    assert sessions(tmp_path) == ["one", "two"]
    writer.ask(lambda manager: manager.check("three", RUN // 4)).result()
    assert writer.delete("one").result()
    writer.ask(lambda manager: manager.check("three", RUN)).result()
    store(writer, big("c"))
    assert sessions(tmp_path) == ["session", "two"]


def test_a_quota_counts_what_was_stored_before_the_start(keep, big, tmp_path):
    writer = keep()
    store(writer, big("a"), big("b"))
    writer.close()
    writer = keep(max_store_bytes=2 * RUN + RUN // 2)
    with pytest.raises(StoreError, match="quota"):
        store(writer, big("c"))
    writer.retain(Retention()).result()
    store(writer, big("c"))


def test_a_long_run_is_refused_at_the_chunk_that_is_too_much_and_others_go_on(keep, big, make, tmp_path):
    writer = keep(max_session_bytes=RUN + RUN // 2)
    long, other = big("long"), big("other", "other")
    for part in range(3):
        for one in (long, other):
            writer.append(one.facts.session_id, one.facts.run_id, part, [one.batches[part]]).result()
    store(writer, make("small"))
    writer.retain(Retention(max_session_bytes=RUN)).result()
    with pytest.raises(StoreError, match="quota of session session"):
        writer.submit(long.facts, long.batches[3:], 3).result()
    with pytest.raises(StoreError, match="before it are gone"):
        writer.append("session", "long", 3, [long.batches[3]]).result()
    store(writer, make("after"))  # what the long run had is free again
    writer.retain(Retention()).result()
    writer.submit(other.facts, other.batches[3:], 3).result()
    assert [run.run_id for run in runs(tmp_path / "session")] == ["small", "after"]
    assert torch.equal(load(tmp_path / "other", "other")[POINT], other.points[POINT])


@settings(suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["run", "long", "abandon", "delete"])), max_size=25),
    quota=st.integers(0, 5),
)
def test_what_is_used_is_what_the_files_have(big, settle, tmp_path_factory, steps, quota):
    root = tmp_path_factory.mktemp("store")
    writer, opened = Writer(root, Catalogue.rebuild(root), segment_bytes=2 * RUN), {}
    writer.retain(Retention(max_store_bytes=max(1, quota * RUN), delete_oldest=quota % 2 == 1)).result()
    for number, (session, step) in enumerate(steps):
        name = f"s{session}"
        with contextlib.suppress(StoreError):
            if step == "run":
                store(writer, big(f"r{number}", name, created=float(number)))
            elif step == "long":
                run, part = opened.pop(name, (big(f"l{number}", name), 0))
                writer.append(name, run.facts.run_id, part, [run.batches[part]]).result()
                if part < 3:
                    opened[name] = run, part + 1
            elif step == "abandon" and name in opened:
                writer.abandon(name, opened.pop(name)[0].facts.run_id).result()
            elif step == "delete":
                writer.delete(name).result()
        settle(writer)  # what was full is closed
        files = {name: sum(file.stat().st_size for file in root.glob(f"{name}/*.arrow")) for name in ("s0", "s1", "s2")}
        used = writer.ask(lambda manager: manager.recount() or manager.used()).result()
        assert {name: used[name] for name in files} == files
        assert sum(files.values()) <= quota * RUN + 5 * 2048  # metadata of runs comes on top
    writer.close()


def test_with_delete_oldest_the_oldest_sessions_go_but_for_pinned_and_open_ones(keep, big, tmp_path):
    writer = keep(max_store_bytes=5 * RUN, delete_oldest=True)
    store(writer, *(big(name, name, created) for created, name in enumerate(("pinned", "open", "old", "new"), 1)))
    assert writer.ask(lambda manager: manager.pin("pinned", True)).result()
    going_on = big("going-on", "open")
    writer.append("open", "going-on", 0, [going_on.batches[0]]).result()
    writer.ask(lambda manager: manager.check("next", RUN)).result()
    assert sessions(tmp_path) == ["new", "old", "open", "pinned"]  # asking alone deletes nothing
    store(writer, big("next", "next", 9.0))
    assert sessions(tmp_path) == ["new", "next", "open", "pinned"]
    with pytest.raises(StoreError, match="store's quota"):
        writer.ask(lambda manager: manager.check("huge", 4 * RUN)).result()
    with pytest.raises(StoreError, match="store's quota"):
        writer.append("huge", "r", 0, [batch for run in "abcd" for batch in big(run, "huge").batches]).result()
    assert sessions(tmp_path) == ["new", "next", "open", "pinned"]  # nothing goes where it would not help


@pytest.fixture
def at_once():
    """`with at_once(writer)`: what is asked within is one round of the writer."""

    @contextlib.contextmanager
    def gathered(writer):
        reached, gate = threading.Event(), threading.Event()
        writer._put(lambda: reached.set() or gate.wait(), behind=True)
        reached.wait()
        yield
        gate.set()

    return gathered


def test_sessions_that_are_written_to_in_one_round_are_not_deleted_for_each_other(keep, big, at_once, tmp_path):
    writer = keep(max_store_bytes=2 * RUN + RUN // 2, delete_oldest=True)
    with at_once(writer):
        futures = [writer.submit(*big(f"r{n}", f"s{n}", float(n))[:2]) for n in range(4)]
    assert [future.exception() is None for future in futures] == [True, True, False, False]
    store(writer, big("next", "next", 9.0))
    assert sessions(tmp_path) == ["next", "s1"]
    assert [len(runs(tmp_path / name)) for name in ("next", "s1")] == [1, 1]


def test_a_session_whose_long_run_was_given_up_in_the_same_round_is_not_deleted_in_it(
    keep, big, at_once, tmp_path, monkeypatch
):
    monkeypatch.setattr("deployments.activations.writer.writer._SYNC_BYTES", 1)
    writer = keep(max_store_bytes=2 * RUN + RUN // 2, delete_oldest=True)
    kept, long, new = big("kept", "old", 1.0), big("long", "old"), big("new", "new", 9.0)
    store(writer, kept)
    with at_once(writer):
        writer.append("old", "long", 0, [long.batches[0]])
        writer.abandon("old", "long")
        large = writer.append("new", "large", 0, [batch for run in "ab" for batch in big(run, "new").batches])
    assert "quota" in str(large.exception())
    assert torch.equal(load(tmp_path / "old", "kept")[POINT], kept.points[POINT])
    store(writer, new, big("newer", "new", 9.0))
    assert sessions(tmp_path) == ["new"]


def test_sessions_are_deleted_by_the_age_of_their_last_run_unless_pinned(keep, big, tmp_path):
    writer = keep()
    store(writer, big("a", "old", 10.0), big("b", "pinned", 10.0), big("c", "again", 10.0), big("d", "again", 90.0))
    store(writer, big("e", "open", 10.0))
    writer.append("open", "going-on", 0, [big("going-on", "open").batches[0]]).result()
    assert writer.ask(lambda manager: manager.pin("pinned", True)).result()
    limits = Retention(max_session_age_s=50)
    assert writer.retain(limits, now=60.0).result() == []
    assert writer.retain(limits, now=61.0).result() == ["old"]
    assert sessions(tmp_path) == ["again", "open", "pinned"]
    writer.abandon("open", "going-on").result()
    assert writer.ask(lambda manager: manager.pin("pinned", False)).result()
    assert sorted(writer.retain(limits, now=141.0).result()) == ["again", "open", "pinned"]
    assert sessions(tmp_path) == []


def test_runs_are_written_between_the_deletions_of_sessions_that_are_too_old(keep, big, monkeypatch):
    writer, new, written = keep(), big("new", "new", 90.0), []
    store(writer, *(big("a", f"old{n}", 10.0) for n in range(3)))
    delete = SessionManager.delete

    def noted(manager, session_id, automatic=False):
        written.append("new" in manager.busy() or writer._catalogue.knows("new"))
        if len(written) == 1:
            writer.submit(new.facts, new.batches)  # waits behind this turn
        return delete(manager, session_id, automatic)

    monkeypatch.setattr(SessionManager, "delete", noted)
    assert sorted(writer.retain(Retention(max_session_age_s=50), now=100.0).result()) == ["old0", "old1", "old2"]
    assert written == [False, True, True]


def test_a_store_looks_by_itself_for_sessions_that_are_too_old(keep, big, tmp_path, monkeypatch, eventually):
    monkeypatch.setattr("deployments.activations.writer.writer._LOOK_S", 0.01)
    writer = keep(max_session_age_s=1000)
    store(writer, big("a", "old", 1.0))
    eventually(lambda: sessions(tmp_path) == [])


def test_a_pinned_session_is_deleted_by_nobody_until_it_is_unpinned_also_after_a_start(keep, big, tmp_path):
    writer = keep()
    store(writer, big("a"))
    assert writer.ask(lambda manager: manager.pin("session", True)).result()
    assert writer.ask(lambda manager: manager.pin("none-such", True)).result() is False
    with pytest.raises(RequestError, match="unpin it") as refused:
        writer.delete("session").result()
    assert (refused.value.status, refused.value.code) == (409, "session_pinned")
    writer.close()
    for path in tmp_path.glob(".catalogue.sqlite3*"):
        path.unlink()
    writer = keep(max_session_age_s=1)
    assert "session" in Pins(tmp_path)
    assert sessions(tmp_path) == ["session"]
    assert writer.ask(lambda manager: manager.pin("session", False)).result()
    assert writer.delete("session").result()
    assert Pins(tmp_path).names() == frozenset()


def test_limits_hold_when_a_store_comes_back_by_itself_and_not_when_another_is_started(tmp_path):
    limits = Retention(10, 20, 30.5, True)
    save_limits(tmp_path, "one", limits, {"app": Retention(10)})
    assert saved_limits(tmp_path, "one") == (limits, {"app": Retention(10)})
    assert saved_limits(tmp_path, "another") == (Retention(), {})  # its operator may have raised them
    save_limits(tmp_path, "another", replace(limits, delete_oldest=False), {})
    assert saved_limits(tmp_path, "another") == (Retention(10, 20, 30.5), {})


def test_a_session_to_which_another_node_writes_is_not_deleted_until_the_store_knows_of_it(keep, big, tmp_path):
    writer, beside = keep(), Writer(tmp_path, Catalogue())
    store(writer, big("a", "again", 100.0), big("b", "long", 100.0), big("c", "old", 100.0))
    store(beside, big("later", "again", 900.0))
    long = big("rest", "long")
    beside.append("long", "rest", 0, long.batches[:1]).result()
    limits = Retention(max_session_age_s=50)
    assert writer.retain(limits, now=160.0).result() == ["old"]
    writer.retain(Retention(max_store_bytes=3 * RUN, delete_oldest=True)).result()
    with pytest.raises(StoreError, match="store's quota"):
        store(writer, big("new", "new", 999.0), big("newer", "new", 999.0))
    assert beside.submit(long.facts, long.batches[1:], 1).result().run_id == "rest"
    beside.close()
    writer._catalogue.look()
    assert writer.retain(limits, now=910.0).result() == ["long"]
    assert writer.retain(limits, now=960.0).result() == ["again"]


def test_nothing_is_deleted_for_a_run_that_would_not_fit_in_the_end(keep, big, tmp_path):
    writer = keep(max_store_bytes=3 * RUN + RUN // 2, delete_oldest=True)
    store(writer, *(big(f"r{n}", f"s{n}", float(n)) for n in range(3)))
    long = big("long", "new")
    for most, error in ((4 * RUN, "store's quota"), (2 * RUN, None)):
        name = f"{most}"
        batches = [batch for one in "ab" for batch in big(one, "new").batches]
        future = writer.append("new", name, 0, batches[:4], most)
        if error:
            assert error in str(future.exception())
            assert sessions(tmp_path) == ["s0", "s1", "s2"]
        else:
            future.result()
            assert sessions(tmp_path) == ["new", "s1", "s2"]
    store(writer, long)


def test_who_reads_keeps_what_is_mapped_and_hears_of_the_rest(keep, big, make, tmp_path):
    writer = keep()
    made = big("a")
    whole = make("whole", {POINT: torch.randn(64, 256)})  # of one batch: mapped
    store(writer, made, whole)
    mapped = load(tmp_path / "session", "whole")[POINT]
    iterator = iter(ActivationRows(tmp_path, [POINT], session="session", batch_size=16))
    first = next(iterator)
    catalogue = writer._catalogue
    readings = Readings(catalogue)
    tag, _ = readings.find(Choice("session"))
    assert writer.retain(Retention(max_session_age_s=1)).result() == ["session"]
    assert not (tmp_path / "session").exists()
    assert torch.equal(mapped, whole.points[POINT])
    assert len(first.points[POINT]) == 16
    with contextlib.suppress(FileNotFoundError):  # what it has open it reads to the end
        assert all(len(batch.points[POINT]) == 16 for batch in iterator)
    with pytest.raises(RequestError, match="it changed since its first page"):
        readings.page(Choice("session"), tag, 0, 8)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "session", "whole")


@given(sizes=st.lists(st.integers(0, 9), max_size=8), missing=st.integers(1, 40), later=st.integers(0, 20))
def test_the_first_that_suffice_are_chosen_and_no_more_are_asked_for(sizes, missing, later):
    sessions = [SessionSize(f"s{n}", size) for n, size in enumerate(sizes)]
    left = iter(sessions)
    chosen = first_of(left, missing, later)
    if sum(sizes) < missing + later:
        assert chosen is None
        return
    assert chosen == sessions[: len(chosen)]
    assert sum(one.bytes for one in chosen) >= missing > sum(one.bytes for one in chosen[:-1])
    asked = sizes[: len(sizes) - len(list(left))]
    assert sum(asked) >= missing + later > sum(asked[:-1])


ids = st.one_of(
    st.text(max_size=140),
    st.sampled_from(["..", ".", "", "../outside", "%2e%2e%2foutside", "/etc", ".pins", ".deleted-1", "linked", "a\0b"]),
    st.builds("../{}".format, st.text(max_size=20)),
)


@settings(suppress_health_check=list(HealthCheck))
@given(session_id=ids)
def test_no_id_and_no_link_leads_out_of_the_store(make, tmp_path_factory, session_id):
    base = tmp_path_factory.mktemp("base")
    root, outside = base / "root", base / "outside"
    for folder in (root, outside):
        folder.mkdir()
    (outside / "precious.arrow").write_bytes(b"x")
    (root / "linked").symlink_to(outside)
    (root / ".pins").symlink_to(outside)
    if names_a_session(session_id) and session_id != "linked":
        (root / session_id).symlink_to(outside)
    recover(root)
    writer = Writer(root, Catalogue.rebuild(root))
    for ask in (
        lambda: writer.delete(session_id),
        lambda: writer.ask(lambda manager: manager.pin(session_id, True)),
        lambda: writer.ask(lambda manager: manager.pin(session_id, False)),
        lambda: writer.submit(*make("r", session_id=session_id)[:2]),
        lambda: writer.retain(Retention(max_session_age_s=1)),
    ):
        with contextlib.suppress(StoreError):
            ask().result()
    with contextlib.suppress(ValueError, OSError):
        Pins(root).set(session_id, True)
    with contextlib.suppress(OSError):
        Pins(root).set("session", True)
    writer.close()
    assert [path.name for path in outside.iterdir()] == ["precious.arrow"]
    assert sorted(path.name for path in base.iterdir()) == ["outside", "root"]
    assert (root / "linked").is_symlink()
