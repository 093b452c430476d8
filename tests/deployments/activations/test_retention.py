"""Quotas reject only what exceeds them; age and pins decide which sessions are deleted."""

from __future__ import annotations

import pytest
import torch

from deployments.activations import read_run, runs
from deployments.activations.facts import SessionName, StoreError
from deployments.activations.limits import Retention
from deployments.activations.writer.writer import Writer

POINT = "layers.0.output"
RUN = 64 << 10  # about what a run of `big` takes


def named(session):
    return SessionName(None, session)


@pytest.fixture
def big(make):
    """`big(run, session, created)`: a run of 64 KiB in four parts."""

    def made(run, session="session", created=1.0, owner=None):
        points = {POINT: torch.randn(64, 256)}
        return make(run, points, session_id=session, parts=4, created=created, owner=owner)

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


def check(writer, session, size):
    writer.make_room(named(session), size, check_only=True).result()


def sessions(root):
    return sorted(item.name for item in root.glob("[!.]*/*"))


def test_a_store_at_its_quota_deletes_nothing_and_has_room_once_something_is_deleted(keep, big, tmp_path):
    store(first := keep(), big("a", "one"), big("b", "two"))  # what was stored before the start counts
    first.close()
    writer = keep(max_store_bytes=2 * RUN + RUN // 2)
    for refused in (lambda: store(writer, big("c")), lambda: check(writer, "three", RUN)):
        with pytest.raises(StoreError, match=r"store's quota .*delete sessions .*max_store_bytes"):
            refused()
    assert sessions(tmp_path) == ["one", "two"]
    check(writer, "three", RUN // 4)
    assert writer.delete(named("one")).result()
    check(writer, "three", RUN)
    store(writer, big("c"))
    assert sessions(tmp_path) == ["session", "two"]


def test_a_session_at_its_quota_refuses_the_chunk_that_is_too_much_and_others_go_on(keep, big, make, tmp_path):
    writer = keep(max_session_bytes=RUN + RUN // 2)
    long, other = big("long"), big("other", "other")
    for part in range(3):
        for one in (long, other):
            writer.append(one.facts.session, one.facts.run_id, part, [one.batches[part]]).result()
    store(writer, make("small"))
    writer.retain(Retention(max_session_bytes=RUN)).result()
    with pytest.raises(StoreError, match=r"quota of session session .*\d+ of 65536 bytes.*max_session_bytes"):
        writer.submit(long.facts, long.batches[3:], 3).result()
    with pytest.raises(StoreError, match="before it are gone"):
        writer.append(named("session"), "long", 3, [long.batches[3]]).result()
    store(writer, make("after"))  # what the long run had is free again
    writer.retain(Retention()).result()
    writer.submit(other.facts, other.batches[3:], 3).result()
    assert [run.run_id for run in runs(tmp_path / "_/session")] == ["small", "after"]
    assert torch.equal(read_run(tmp_path / "_/other", "other")[POINT], other.points[POINT])


def test_with_delete_oldest_the_owners_oldest_sessions_go_but_for_pinned_and_open_ones(keep, big, tmp_path):
    writer = keep(max_store_bytes=6 * RUN, delete_oldest=True)
    store(writer, *(big(name, name, created) for created, name in enumerate(("pinned", "open", "old", "new"), 1)))
    store(writer, big("hers", "hers", 0.0, "alice"))
    writer._index.pin(named("pinned"), True)
    going_on = big("going-on", "open")
    writer.append(named("open"), "going-on", 0, [going_on.batches[0]]).result()
    check(writer, "next", RUN)
    before = ["hers", "new", "old", "open", "pinned"]
    assert sessions(tmp_path) == before  # asking alone deletes nothing
    with pytest.raises(StoreError, match="store's quota"):  # bob has nothing that could go
        store(writer, big("his", "his", 9.0, "bob"))
    store(writer, big("next", "next", 9.0))
    after = ["hers", "new", "next", "open", "pinned"]
    assert sessions(tmp_path) == after
    with pytest.raises(StoreError, match="store's quota"):
        check(writer, "huge", 4 * RUN)
    with pytest.raises(StoreError, match="store's quota"):
        writer.append(named("huge"), "r", 0, [one for run in "abcd" for one in big(run, "huge").batches]).result()
    assert sessions(tmp_path) == after  # nothing goes where it would not help


def test_sessions_are_deleted_by_the_age_of_their_last_run_unless_pinned_or_busy(keep, big, tmp_path):
    writer = keep()
    store(writer, big("a", "old", 10.0), big("b", "pinned", 10.0), big("c", "again", 10.0), big("d", "again", 90.0))
    store(writer, big("e", "open", 10.0), big("f", "hers", 10.0, "alice"))
    writer.append(named("open"), "going-on", 0, [big("going-on", "open").batches[0]]).result()
    writer._index.pin(named("pinned"), True)
    limits = Retention(max_session_age_s=50)
    assert writer.retain(limits, now=60.0).result() == []
    assert sorted(writer.retain(limits, now=61.0).result(), key=str) == [("alice", "hers"), named("old")]
    assert sessions(tmp_path) == ["again", "open", "pinned"]
    writer.abandon(named("open"), "going-on").result()
    writer._index.pin(named("pinned"), False)
    assert sorted(one.id for one in writer.retain(limits, now=141.0).result()) == ["again", "open", "pinned"]
    assert sessions(tmp_path) == []


def test_a_session_to_which_another_node_writes_is_not_deleted_until_the_store_knows_of_it(keep, big, tmp_path):
    writer, beside = keep(), Writer(tmp_path, None, report=lambda updates: [])
    store(writer, big("a", "again", 100.0), big("b", "long", 100.0), big("c", "old", 100.0))
    store(beside, big("later", "again", 900.0))
    long = big("rest", "long")
    beside.append(named("long"), "rest", 0, long.batches[:1]).result()
    limits = Retention(max_session_age_s=50)
    assert writer.retain(limits, now=160.0).result() == [named("old")]
    writer.retain(Retention(max_store_bytes=3 * RUN, delete_oldest=True)).result()
    with pytest.raises(StoreError, match="store's quota"):
        store(writer, big("new", "new", 999.0), big("newer", "new", 999.0))
    assert beside.submit(long.facts, long.batches[1:], 1).result().run_id == "rest"
    beside.close()
    writer._index.look()
    assert writer.retain(limits, now=910.0).result() == [named("long")]
    assert writer.retain(limits, now=960.0).result() == [named("again")]
