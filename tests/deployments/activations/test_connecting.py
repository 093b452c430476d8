"""How a replica finds the writer for its runs: a store that starts late, and locks that hold on one node only."""

from __future__ import annotations

import asyncio
import fcntl

import pytest
import ray

from deployments.activations.actors import store as stores
from deployments.activations.actors.store import ActivationStore
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import StoreError
from deployments.activations.files import machines
from deployments.activations.files.machines import Heartbeat
from deployments.activations.limits import Retention
from deployments.activations.nodes.receiving import Home
from deployments.activations.nodes.writer import NodeWriter
from deployments.activations.writer import recovery
from deployments.activations.writer.writer import Writer


class Method:
    def __init__(self, answer):
        self._answer = answer

    def remote(self, *args):
        async def answered():
            return self._answer(*args)

        return answered()


class Store:
    """A store that says where it is once it has started."""

    def __init__(self, *homes):
        self.homes = list(homes)
        self.place = Method(self._place)

    def _place(self):
        if not self.homes:
            raise ray.exceptions.RayError("it starts")
        return self.homes.pop(0)


def writer_of(root, store, archive=None):
    return NodeWriter(str(root), store, archive, "ray-id", "10.0.0.2")


def test_runs_fail_with_the_reason_while_the_store_starts(tmp_path, make):
    made = make("lost")

    async def write():
        await writer_of(tmp_path, Store()).write(made.facts, [])

    with pytest.raises(StoreError, match="has not started .*it starts.*send the request again"):
        asyncio.run(write())


def test_a_directory_whose_locks_hold_on_one_node_alone_is_refused_and_others_are_not(tmp_path, monkeypatch):
    catalogue = Catalogue.rebuild(tmp_path)
    home = Home("head", "mark", "this life")

    async def check(again):
        await writer_of(tmp_path, Store(again))._check_locks(home)

    asyncio.run(check(home))  # the lock is seen to be held
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # as on a mount whose locks are local
    with pytest.raises(StoreError, match="hold within each node only.*Mount it with locks"):
        asyncio.run(check(home))
    asyncio.run(check(Home("head", "mark", "another life")))  # it may have been let go of
    catalogue.close()


def test_a_directory_that_another_machine_writes_is_refused_though_no_lock_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # as on a mount whose locks are local
    monkeypatch.setattr(machines, "BEAT_S", 0.05)
    other = Heartbeat(tmp_path, "another machine")
    live = tmp_path / "session" / "20260101T000000-00000000-000001.arrow"
    live.parent.mkdir()
    live.write_bytes(b"half a batch")

    async def node_writer():
        (tmp_path / ".node").touch()
        await writer_of(tmp_path, Store()).ready()

    for start in (lambda: ActivationStore(str(tmp_path)), lambda: asyncio.run(node_writer())):
        with pytest.raises(StoreError, match="Locks on .* hold within each node only, and .* uses it.*Mount it with"):
            start()
        assert live.read_bytes() == b"half a batch"
    other.close()
    monkeypatch.setattr(machines, "WATCH_S", 0.2)
    store = ActivationStore(str(tmp_path))  # the other machine is gone
    store._writer.close()
    store._catalogue.close()
    assert list(tmp_path.glob(".machine-*")) == [store._heartbeat._file]


def test_a_second_server_on_a_directory_is_refused_and_a_directory_that_was_let_go_of_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "_ENDING_S", 0.0)
    first = ActivationStore(str(tmp_path))
    with pytest.raises(
        StoreError, match="Another server or node uses the activation store at .*another activations_dir"
    ):
        ActivationStore(str(tmp_path))
    first._writer.close()
    first._catalogue.close()
    second = ActivationStore(str(tmp_path))
    second._writer.close()
    second._catalogue.close()


def test_an_application_does_not_change_the_limits_of_another_that_runs(tmp_path, monkeypatch):
    running = {"one", "two"}
    monkeypatch.setattr(stores, "_running", lambda applications: applications & running)
    store = ActivationStore(str(tmp_path))

    def retain(application, **limits):
        asyncio.run(store.retain(Retention(**limits), application=application))

    retain("one", max_session_age_s=60.0)
    with pytest.raises(StoreError, match=r"'one', max_session_age_s=60.0, but 'two' has no limits: give it the same"):
        retain("two")
    assert store._writer._manager.retention.max_session_age_s == 60
    retain("two", max_session_age_s=60.0)
    store._writer.close()
    store._catalogue.close()
    store = ActivationStore(str(tmp_path))  # its process was killed, and Ray starts it again
    with pytest.raises(StoreError, match="'two', max_session_age_s=60.0"):
        retain("one")
    running.remove("two")
    retain("one")  # its own may change
    running.remove("one")
    retain("two", max_session_age_s=30.0)
    assert store._writer._manager.retention.max_session_age_s == 30
    store._writer.close()
    store._catalogue.close()


def test_a_run_of_a_request_that_goes_on_is_kept_longer_than_the_lease(tmp_path, make, long, monkeypatch):
    now = [1000.0]
    writer = Writer(tmp_path, Catalogue(), lease_s=900)
    monkeypatch.setattr("deployments.activations.writer.open_runs.time.monotonic", lambda: now[0])
    for name in ("long", "silent"):
        facts = long.facts if name == "long" else make(name).facts
        writer.append("session", facts.run_id, 0, long.batches[:1]).result()
    for _ in range(3):
        now[0] += 600
        writer.renew("session", "long").result()
        writer.abandon("nothing", "nothing").result()  # behind a round
    with pytest.raises(StoreError, match="no rows of it came for 900 s"):
        writer.append("session", "silent", 1, long.batches[1:2]).result()
    assert writer.submit(long.facts, long.batches[1:], 1).result().run_id == "long"
    monkeypatch.undo()
    writer.close()


def test_a_store_that_runs_other_code_is_told_of_and_one_too_old_to_say_is_refused(caplog):
    store = Store()
    store.code = Method(lambda: "another")
    asyncio.run(stores.check_code("/store", store))
    assert "/store runs another version's code: restart Ray" in caplog.text
    caplog.clear()
    store.code = Method(stores.code_version)
    asyncio.run(stores.check_code("/store", store))
    assert caplog.text == ""
    del store.code
    with pytest.raises(StoreError, match="earlier version's code: restart Ray"):
        asyncio.run(stores.check_code("/store", store))
