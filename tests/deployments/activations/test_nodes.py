"""Several writers, on several nodes, below one root."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from deployments.activations import load, runs
from deployments.activations.accounts import Account
from deployments.activations.claims import Claims
from deployments.activations.entries import RunName
from deployments.activations.facts import StoreError, names_a_session
from deployments.activations.retention import Retention
from deployments.activations.store import ActivationStore
from deployments.activations.taking import NodeWriter
from deployments.errors import RequestError

ROOT = Path(__file__).parents[3]
POINT = "layers.0.output"
RUN = 64 << 10  # about what a run of `big` takes


def test_each_node_writes_files_of_its_own_and_the_store_knows_them_all(tmp_path):
    # In a process of its own, since this one may have joined the tests' shared cluster.
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    script = Path(__file__).with_name("two_nodes.py")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path)], env=env, capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith(("both", "a "))]) == 5


# ---- a store and a node's writer in one process, which call each other as over Ray


class Call:
    """An answer on its way, as a reference of Ray's is."""

    def __init__(self, future):
        self._future = future

    def __await__(self):
        return asyncio.wrap_future(self._future).__await__()

    def future(self):
        return self._future


class Method:
    def __init__(self, call):
        self.remote = call

    def options(self, **_):
        return self


class Nodes:
    """A store, here, and a writer of another node, there. What it tells waits while `may_tell` is not set."""

    def __init__(self, root, reader_of):
        self.root, self._reader_of = root, reader_of
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.may_tell = threading.Event()
        self.may_tell.set()
        self.told = []
        self.here = ActivationStore(str(root))
        self.there = NodeWriter(str(root), self)

    def __getattr__(self, name):
        return Method(lambda *args: Call(self._begin(self._note(*args) if name == "note" else self._of(name, *args))))

    async def _of(self, name, *args):
        return await getattr(self.here, name)(*args)

    async def _note(self, *args):
        await asyncio.to_thread(self.may_tell.wait)
        self.told.append(args)
        await self.here.note(*args)

    def _begin(self, made):
        return asyncio.run_coroutine_threadsafe(made, self._loop)

    def ask(self, made):
        return self._begin(made).result(60)

    def append(self, made, part, most=0, where=None, fence=None):
        where = where or self.there
        return self.ask(where.append(*made.facts_and_id, part, [_given(made.batches[part])], most, fence))

    def begin_store(self, made, part=0, where=None, fence=None):
        where = where or self.there
        return self._begin(where.write(made.facts, [_given(batch) for batch in made.batches[part:]], part, fence))

    def store(self, made, part=0, where=None, fence=None):
        return self.begin_store(made, part, where, fence).result(60)

    def keep(self, now=None, **limits):
        return self.ask(self.here.retain(Retention(**limits), now))

    def start_again(self):
        """The store was killed, and comes back by itself."""
        self.here._writer.close()
        self.here._catalogue.close()
        self.here = ActivationStore(str(self.root))

    def session(self, session_id):
        return self.ask(self._reader_of(self.here).session(session_id))

    def sessions(self):
        return sorted(item.name for item in self.root.iterdir() if names_a_session(item.name))

    def on_disk(self):
        return sum(file.stat().st_size for file in self.root.glob("*/*.arrow"))

    def close(self):
        self.may_tell.set()
        self.there._writer.close()
        self.here._writer.close()
        self.here._catalogue.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


async def _given(batch):
    return batch


@pytest.fixture
def nodes(tmp_path, reader_of, monkeypatch):
    nodes = Nodes(tmp_path, reader_of)
    handle = type("Handle", (), {})()
    for name in ("hold", "release"):
        call = getattr(nodes.there, name)
        setattr(handle, name, Method(lambda *args, call=call: Call(nodes._begin(call(*args)))))
    monkeypatch.setattr("deployments.activations.store.node_writers", lambda root: [handle])
    yield nodes
    nodes.close()


class Big:
    """A run of 64 KiB in four parts."""

    def __init__(self, make, run, session, created):
        self.facts, self.batches, self.points = make(
            run, {POINT: torch.randn(64, 256)}, session_id=session, parts=4, created=created
        )
        self.facts_and_id = session, run


@pytest.fixture
def big(make):
    return lambda run, session="session", created=1.0: Big(make, run, session, created)


def test_runs_of_another_node_make_room_as_those_of_the_stores_own_do(nodes, big):
    nodes.keep(max_store_bytes=3 * RUN + RUN // 2, delete_oldest=True)
    for number in range(8):
        nodes.store(big(f"r{number}", f"s{number}", float(number)))
    assert nodes.sessions() == ["s5", "s6", "s7"]
    assert nodes.here._writer._pool.used() == nodes.on_disk()


def test_a_long_run_of_another_node_is_refused_at_the_part_that_is_too_much_and_its_room_is_free_again(nodes, big):
    nodes.keep(max_store_bytes=7 * RUN // 4)
    first, second = big("first"), big("second", "other")
    for part in range(3):
        nodes.append(first, part)
        nodes.append(second, part)
    with pytest.raises(StoreError, match="store's quota"):
        nodes.append(first, 3)
    nodes.ask(nodes.there.abandon("session", "first"))
    assert nodes.store(second, 3).run_id == "second"
    nodes.ask(nodes.here.check_room("more", RUN // 2))
    assert [run.run_id for run in runs(nodes.root / "other")] == ["second"]


@pytest.mark.parametrize("parts", [0, 2])
def test_a_late_run_of_another_node_does_not_become_part_of_a_session_that_another_key_claims(nodes, big, parts):
    alice, bob = Account("alice", is_admin=False), Account("bob", is_admin=False)
    late, other = big("late"), big("other")
    fence = nodes.ask(nodes.here.claim("session", alice))
    for part in range(parts):
        nodes.append(late, part, fence=fence)
    nodes.store(big("first"), fence=fence)
    assert nodes.ask(nodes.here.delete("session", alice))
    nodes.store(other, fence=nodes.ask(nodes.here.claim("session", bob)))
    with pytest.raises(StoreError, match="deleted"):
        nodes.store(late, parts, fence=fence)
    assert [run.run_id for run in runs(nodes.root / "session")] == ["other"]


def test_a_run_that_the_store_admitted_before_its_session_was_deleted_is_not_written_behind_that(
    nodes, big, monkeypatch
):
    alice, bob = Account("alice", is_admin=False), Account("bob", is_admin=False)
    fence = nodes.ask(nodes.here.claim("session", alice))
    nodes.store(big("first"), fence=fence)
    make_room = nodes.here.make_room

    async def then_deleted(*args):
        await make_room(*args)
        monkeypatch.setattr(nodes.here, "make_room", make_room)
        await nodes.here.delete("session", alice)
        await nodes.here.claim("session", bob)

    monkeypatch.setattr(nodes.here, "make_room", then_deleted)
    with pytest.raises(StoreError, match="deleted"):
        nodes.store(big("late"), fence=fence)
    assert nodes.sessions() == []


def test_room_is_kept_for_a_run_until_nothing_is_heard_of_it_for_the_lease():
    name = RunName("session", "r")
    for lease_s, used in ((900.0, 7), (0.0, 0)):
        claims = Claims(lease_s)
        claims.put(name, 3)
        claims.put(name, 7)
        assert (claims.used(), claims.used("session"), claims.used("other"), claims.of(name)) == (used, used, 0, used)
        assert claims.sessions() == ({"session"} if used else set())
        claims.end(name)
        assert claims.used() == 0


def test_a_session_is_not_deleted_for_its_age_while_a_run_of_another_node_is_on_its_way(nodes, big):
    old, long = big("old"), big("long")
    nodes.store(old)
    for part in range(3):
        nodes.append(long, part)
        assert nodes.keep(max_session_age_s=60) == []
    nodes.may_tell.clear()
    stored = nodes.begin_store(long, 3)
    assert nodes.keep(max_session_age_s=60) == []
    nodes.may_tell.set()
    uri = stored.result(60).points[POINT].uri
    assert torch.equal(load(uri, "long")[POINT], long.points[POINT])
    assert nodes.keep(max_session_age_s=60) == ["session"]
    again = big("again")
    assert torch.equal(load(nodes.store(again).points[POINT].uri, "again")[POINT], again.points[POINT])


def test_a_store_that_starts_again_leaves_a_session_to_the_node_that_writes_to_it(nodes, big):
    nodes.store(big("old"))
    long = big("long")
    for part in range(3):
        nodes.append(long, part)
    nodes.start_again()
    assert nodes.keep(max_session_age_s=60) == []
    nodes.store(long, 3)
    assert [run["run_id"] for run in nodes.session("session")["runs"]] == ["long", "old"]


def test_a_store_that_starts_again_counts_a_file_that_a_node_has_open_once(nodes, big):
    nodes.store(big("a"))
    nodes.start_again()
    nodes.keep(max_store_bytes=10 * RUN)
    nodes.store(big("b"))
    assert nodes.here._writer._pool.used() == nodes.on_disk()


def test_a_pinned_session_that_is_not_deleted_keeps_the_runs_on_their_way(nodes, big):
    nodes.store(big("a"))
    nodes.ask(nodes.here.pin("session", True))
    long = big("long")
    nodes.append(long, 0)
    with pytest.raises(RequestError, match="unpin it"):
        nodes.ask(nodes.here.delete("session"))
    nodes.store(long, 1)
    assert [run["run_id"] for run in nodes.session("session")["runs"]] == ["a", "long"]


def test_a_session_that_is_gone_is_not_listed_again_by_what_a_node_tells_late(nodes, big):
    nodes.store(big("a"))
    assert nodes.ask(nodes.here.delete("session"))
    nodes.ask(nodes.here.note(*nodes.told[0]))
    assert nodes.session("session") is None
    assert nodes.here._writer._pool.used() == 0
