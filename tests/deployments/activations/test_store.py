"""The store and its reader as actors, and as their own classes in this process."""

from __future__ import annotations

import contextlib
import os

import pytest
import ray
import torch
from ray.util.state import get_actor
from safetensors.torch import load as tensors

from deployments.activations import read_run
from deployments.activations.actors import store as stores
from deployments.activations.actors.reader import connect_reader
from deployments.activations.actors.store import connect
from deployments.activations.facts import RunEnd, SessionName, StoreError
from deployments.activations.index.database import index_path
from deployments.activations.limits import Retention
from deployments.activations.segments.schema import Packed
from deployments.activations.writer import recovery
from deployments.errors import RequestError
from tests.waiting import until

POINT = "layers.0.output"
SESSION = SessionName(None, "session")


@pytest.fixture
def store(open_store):
    return open_store("made/here")


@pytest.mark.parametrize("sent", [ray.put, lambda batch: ray.put(Packed(batch)), lambda batch: batch])
def test_what_was_sent_by_reference_or_as_it_is_reads_back_and_is_listed(cluster, make, store, sent):
    made = [make(f"r{n}", {POINT: torch.randn(6, 8).bfloat16(), "heads": torch.randn(6, 2, 4)}) for n in range(4)]
    ends = [RunEnd(one.facts, [sent(batch) for batch in one.batches]) for one in made]
    bad = RunEnd(made[0].facts, [sent(batch) for batch in make("r0", session_id="other").batches])
    *stored, refused = store.write_all([*ends, bad])
    for one, run in zip(made, stored, strict=True):
        assert torch.equal(read_run(run.points[POINT].uri, run.run_id)[POINT], one.points[POINT])
    assert "one session" in str(refused)
    assert (store.sessions()[0]["id"], store.sessions()[0]["runs"]) == ("session", 4)
    assert [run["run_id"] for run in store.session("session")["runs"]] == ["r0", "r1", "r2", "r3"]


def test_a_run_in_parts_gives_rows_once_it_is_whole_and_no_more_when_it_is_deleted(make, store):
    kept, dropped = (make(name, {"p": torch.randn(6, 8).bfloat16()}, parts=3) for name in ("kept", "dropped"))
    ask = lambda: store.rows("kept", [["p"]], "prompt", 1000)  # noqa: E731
    for made in (kept, dropped):
        for part in range(2):
            store.append(SESSION, made.facts.run_id, part, [made.batches[part]])
    assert store.withdraw(SESSION, ["dropped", "unknown"])
    assert ask() is None
    store.write(kept.facts, kept.batches[2:], 2)
    with pytest.raises(StoreError, match="abandoned"):
        store.write(dropped.facts, [], 2)
    assert not store.withdraw(SESSION, ["kept"])
    assert torch.equal(tensors(ask())["0"], kept.points["p"][:5])
    assert store.delete("session")
    assert (ask(), store.session("session"), store.delete("session")) == (None, None, False)


@pytest.mark.parametrize("lost", [False, True], ids=["index-kept", "index-lost"])
def test_a_store_started_again_knows_runs_pins_and_limits(store, open_store, lost):
    for run, session, owner in (("a", "session", None), ("b", "kept", "alice"), ("c", "kept", None)):
        store.record(run, session, owner)
    store.retain(Retention(max_session_bytes=100_000))
    assert store.pin("kept", True, owner="alice")
    assert store.pin("session", True)
    assert store.pin("session", False)
    assert not store.pin("none", True)
    before = [store.sessions(), store.session("session"), store.session("kept", owner="alice")]
    assert [one["pinned"] for one in before[0]] == [False, True, False]
    store.close()
    if lost:
        index_path(store.root).unlink()
    again = open_store("made/here")
    # Files have their footers now.
    assert [one | {"bytes": 0} for one in again.sessions()] == [one | {"bytes": 0} for one in before[0]]
    after = [again.session("session"), again.session("kept", owner="alice")]
    assert [one["runs"] for one in after] == [one["runs"] for one in before[1:]]
    with pytest.raises(StoreError, match="quota of session"):
        again.check_room(SESSION, 50_000)
    with pytest.raises(RequestError, match="unpin it"):
        again.delete("kept", owner="alice")


def test_a_second_server_on_a_directory_is_refused_until_the_first_has_ended(open_store, monkeypatch):
    monkeypatch.setattr(recovery, "_ENDING_S", 0.0)
    first = open_store()
    with pytest.raises(StoreError, match=rf"Another server .process {os.getpid()} .* uses .*another activations_dir"):
        open_store()
    first.close()
    open_store()


def test_an_application_does_not_change_the_limits_of_another_that_runs(open_store, monkeypatch):
    alive = {"one", "two"}
    monkeypatch.setattr(stores, "_running", lambda applications: applications & alive)
    store = open_store()
    store.retain(Retention(max_session_age_s=60.0), application="one")
    with pytest.raises(StoreError, match=r"'one', max_session_age_s=60.0, but 'two' has no limits: give it the same"):
        store.retain(Retention(), application="two")
    store.retain(Retention(max_session_age_s=60.0), application="two")
    alive.remove("two")
    store.retain(Retention(), application="one")  # its own may change
    alive.remove("one")
    store.retain(Retention(max_session_bytes=10), application="two")
    with pytest.raises(StoreError, match="max_session_bytes"):
        store.check_room(SESSION, 11)


def test_all_who_ask_for_a_directory_share_one_actor_that_comes_back_when_killed_once_it_can(cluster, make, tmp_path):
    root = tmp_path / "shared"
    first, second, reader = connect(str(root)), connect(str(root)), connect_reader(str(root))
    made, after = make("r"), make("after")
    ray.get(first.write.remote(made.facts, [ray.put(made.batches[0])]))
    assert ray.get(reader.session.remote("session"))["runs"][0]["run_id"] == "r"
    ray.get(second.retain.remote(Retention(max_store_bytes=1 << 20)))
    (root / ".lock").rename(root / ".aside")
    (root / ".lock").symlink_to(root / ".aside")  # is not followed: it cannot come back
    ray.kill(first, no_restart=False)

    def answered(ask):
        """What is answered once the actor is up again; a reader's call may reach the store before it is."""

        def asked():
            with contextlib.suppress(ray.exceptions.ActorUnavailableError, RequestError):
                return ray.get(ask(), timeout=60)

        return until(asked)

    try:
        until(lambda: get_actor(first._actor_id.hex(), cluster.dashboard).num_restarts > 1)
        (root / ".lock").unlink()
        answered(second.marker.remote)
        ray.get(second.write.remote(after.facts, [ray.put(after.batches[0])]))
        listed = answered(lambda: reader.session.remote("session"))
        assert {run["run_id"] for run in listed["runs"]} == {"r", "after"}
        with pytest.raises(StoreError, match="quota"):  # the limits are those that it had
            ray.get(second.check_room.remote(SESSION, 1 << 20))
    finally:
        ray.kill(second)
        ray.kill(reader)
