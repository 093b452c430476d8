from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from itertools import count

import pytest
import ray
import torch
from safetensors.torch import load as tensors

from deployments.activations import load
from deployments.activations.actors.reader import connect_reader
from deployments.activations.actors.store import ActivationStore, connect
from deployments.activations.facts import StoreError
from deployments.activations.limits import Retention
from deployments.activations.segments.packing import Packed
from deployments.activations.state.state import NAME
from deployments.activations.writer import retention
from deployments.activations.writer.group_commit import Commits
from tests.waiting import until, wait_until

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def store(tmp_path):
    store = ActivationStore(str(tmp_path / "made" / "here"))
    yield store
    store._writer.close()


@pytest.fixture
def reader(store, reader_of):
    return reader_of(store)


def test_batches_passed_by_reference_are_stored_listed_and_deleted(make, store, reader):
    points = {"layers.0.output": torch.randn(6, 8).bfloat16(), "heads": torch.randn(6, 2, 4)}
    made = [make(f"r{number}", points, parts=2) for number in range(4)]

    async def steps():
        writes = [store.write(item.facts, [ray.put(batch) for batch in item.batches]) for item in made]
        stored = await asyncio.gather(*writes)
        return stored, await reader.sessions(), await reader.session("session"), await store.delete("session")

    stored, sessions, session, deleted = asyncio.run(steps())
    assert [run.run_id for run in stored] == ["r0", "r1", "r2", "r3"]
    assert (sessions[0]["id"], sessions[0]["runs"], len(session["runs"])) == ("session", 4, 4)
    assert deleted
    assert asyncio.run(reader.session("session")) is None


@pytest.mark.parametrize("sent", [ray.put, lambda batch: ray.put(Packed(batch)), lambda batch: batch])
def test_what_was_sent_by_reference_or_as_it_is_reads_back(make, store, sent):
    made = make("r", {"p": torch.randn(5, 8).bfloat16()})
    stored = asyncio.run(store.write(made.facts, [sent(made.batches[0])]))
    assert torch.equal(load(stored.points["p"].uri)["p"], made.points["p"])


def test_a_run_sent_in_parts_by_reference_reads_back_and_an_abandoned_one_does_not(make, store, reader):
    kept, dropped = (make(name, {"p": torch.randn(6, 8).bfloat16()}, parts=3) for name in ("kept", "dropped"))

    async def steps():
        for made in (kept, dropped):
            for part in range(2):
                await store.append("session", made.facts.run_id, part, [ray.put(made.batches[part])])
        await store.abandon("session", "dropped")
        stored = await store.write(kept.facts, [ray.put(kept.batches[2])], 2)
        with pytest.raises(StoreError, match="abandoned"):
            await store.write(dropped.facts, [], 2)
        return stored, await reader.session("session")

    stored, session = asyncio.run(steps())
    assert [run["run_id"] for run in session["runs"]] == ["kept"]
    assert torch.equal(load(stored.points["p"].uri)["p"], kept.points["p"])


def test_a_run_gives_rows_once_it_is_whole_and_no_more_when_it_is_deleted(make, store, reader):
    made = make("r", {"p": torch.randn(6, 8).bfloat16()}, parts=2)

    async def steps():
        def rows():
            return reader.rows("r", [["p"]], "prompt", 1000)

        await store.append("session", "r", 0, [ray.put(made.batches[0])])
        unfinished = await rows()
        await store.write(made.facts, [ray.put(made.batches[1])], 1)
        whole = await rows()
        await store.delete("session")
        return unfinished, whole, await rows()

    unfinished, whole, deleted = asyncio.run(steps())
    assert unfinished is deleted is None
    assert torch.equal(tensors(whole)["0"], made.points["p"][:5])


@ray.remote(num_cpus=0)
class Owner:
    def put(self, batch):
        return [ray.put(batch)]


def get_for_a_minute(reference):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ray.get(reference)


def test_a_batch_that_died_with_its_owner_fails_its_run_alone(make, store, reader):
    made = make("lost", {"p": torch.zeros(1000, 500)})
    owner = Owner.remote()
    [reference] = ray.get(owner.put.remote(made.batches[0]))
    ray.kill(owner)
    with pytest.raises(ray.exceptions.OwnerDiedError):
        get_for_a_minute(reference)  # the object outlives its owner for a moment
    with pytest.raises(StoreError, match="lost before they were stored"):
        asyncio.run(store.write(made.facts, [reference]))
    after = make("after")
    assert asyncio.run(store.write(after.facts, [ray.put(after.batches[0])])).run_id == "after"
    assert [run["run_id"] for run in asyncio.run(reader.session("session"))["runs"]] == ["after"]


def test_a_store_started_again_knows_what_is_on_disk(make, store, reader, reader_of, tmp_path):
    made = make("r")
    asyncio.run(store.write(made.facts, [ray.put(made.batches[0])]))
    store._writer.close()
    before = asyncio.run(reader.session("session"))
    store._catalogue.close()
    again = ActivationStore(str(tmp_path / "made" / "here"))
    assert asyncio.run(reader_of(again).session("session")) == before
    again._writer.close()


def test_after_a_fault_of_the_writer_all_who_wait_are_told_and_the_next_run_is_stored(make, store, monkeypatch):
    made, after = make("r"), make("after")
    with monkeypatch.context() as patched:
        patched.setattr(Commits, "end", lambda *args: 1 / 0)
        with pytest.raises(StoreError, match="log says why"):
            asyncio.run(store.write(made.facts, [ray.put(made.batches[0])]))
    assert asyncio.run(store.write(after.facts, [ray.put(after.batches[0])])).run_id == "after"


def test_limits_and_pins_hold_also_for_the_writer_that_takes_the_place_of_one_that_failed(
    make, store, reader, monkeypatch
):
    made = make("r")

    async def steps():
        await store.write(made.facts, [ray.put(made.batches[0])])
        await store.retain(Retention(max_session_bytes=10))
        with monkeypatch.context() as patched:
            patched.setattr("deployments.activations.writer.retention.SessionManager.note", lambda *args: 1 / 0)
            with pytest.raises(StoreError, match="log says why"):
                await store.report("", [], [], [])
        assert await store.pin("session", True)
        with pytest.raises(StoreError, match="quota of session"):
            await store.check_room("session", 11)
        return await reader.session("session")

    assert asyncio.run(steps())["pinned"]


def test_a_deletion_waits_for_no_other(make, store, monkeypatch):
    gate, removals, real = threading.Event(), count(), retention.remove_folder
    monkeypatch.setattr(retention, "remove_folder", lambda trash: (next(removals) or gate.wait()) and real(trash))

    async def steps():
        for name in ("large", "small"):
            made = make("r", session_id=name)
            await store.write(made.facts, [ray.put(made.batches[0])])
        first = asyncio.create_task(store.delete("large"))
        await wait_until(lambda: not store._catalogue.knows("large"))
        assert await asyncio.wait_for(store.delete("small"), 30)
        assert not first.done()
        gate.set()
        assert await first

    try:
        asyncio.run(steps())
    finally:
        gate.set()


def test_after_any_error_nodes_that_come_back_are_looked_for_again(store, monkeypatch):
    looks = list[int]()

    def mark_lost(nodes):
        looks.append(1)
        if len(looks) == 1:
            raise OSError("the disk is away")

    monkeypatch.setattr("deployments.activations.actors.store._WATCH_S", 0.01)
    monkeypatch.setattr("deployments.activations.state.nodes.Nodes.mark_lost", mark_lost)
    store._watch()
    until(lambda: len(looks) > 1)


def test_all_who_ask_for_a_directory_share_one_actor_that_comes_back_when_killed_once_it_can(make, tmp_path):
    root = tmp_path / "shared"
    first, second, reader = connect(str(root)), connect(str(root)), connect_reader(str(root))
    code = ray.get(first.code.remote())
    made = make("r")
    ray.get(first.write.remote(made.facts, [ray.put(made.batches[0])]))
    assert ray.get(reader.session.remote("session"))["runs"][0]["run_id"] == "r"
    ray.get(second.retain.remote(Retention(max_store_bytes=1 << 20)))
    kept = (root / NAME).rename(tmp_path / "aside")
    (root / NAME).symlink_to(kept)  # is not followed: it cannot come back
    ray.kill(first, no_restart=False)
    after = make("after")

    def answered(ask):
        """What is answered once the actor is up again; a reader's call may reach the store before it is."""

        def asked():
            with contextlib.suppress(ray.exceptions.ActorUnavailableError):
                return ray.get(ask(), timeout=60)

        return until(asked)

    try:
        for name in (".new-1", ".new-2"):  # each is removed at a start: at the second, one has failed
            (root / name).touch()
            until(lambda: not any(root.glob(".new-*")))
        kept.rename(root / NAME)
        assert answered(second.code.remote) == code
        ray.get(second.write.remote(after.facts, [ray.put(after.batches[0])]))
        listed = answered(lambda: reader.session.remote("session"))
        assert {run["run_id"] for run in listed["runs"]} == {"r", "after"}
        with pytest.raises(StoreError, match="quota"):  # the limits are those that it had
            ray.get(second.check_room.remote("session", 1 << 20))
    finally:
        ray.kill(second)
        ray.kill(reader)


def test_a_uri_of_a_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a path"):
        ActivationStore(tmp_path.as_uri())


def test_a_relative_root_is_refused():
    with pytest.raises(ValueError, match="absolute"):
        ActivationStore("activations")
