"""What an answer reports of its activations if the store cannot take them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from deployments.activations.facts import StoreError
from deployments.activations.index.index import Index
from deployments.activations.reader.loading import read_run, runs
from deployments.activations.writer.writer import Writer
from deployments.engine.request import GREEDY
from deployments.job import Job
from deployments.messages import End, Refusal
from deployments.options import Options
from deployments.points.capture import Capture
from deployments.replica.replica import ModelReplica
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("cluster")  # rows go through the object store


def _arrived(batches):
    return ray.get([batch if isinstance(batch, ray.ObjectRef) else ray.put(batch) for batch in batches])


class Method:
    """Stands where a method of an actor's handle does."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self.remote = call


class FailingStore:
    """A store that takes nothing, and knows so before, or not."""

    def __init__(self, error: Exception, knows: bool = False) -> None:
        self.error = error
        self.write_all = self.append = Method(self._fail)
        self.abandon = Method(self._forget)
        self.check_room = Method(self._fail if knows else self._forget)

    async def _fail(self, *_):
        raise self.error

    async def _forget(self, *_):
        pass


class SlowStore:
    """The real store's writer, at which each chunk waits for leave."""

    def __init__(self, root: Path) -> None:
        self.leave = asyncio.Semaphore(0)
        self.writer = Writer(root, Index.scanned(root))
        self.append, self.write_all, self.abandon = map(Method, (self._append, self._write_all, self._abandon))
        self.appended, self.arrived = 0, asyncio.Event()  # chunks; the first has come

    async def _append(self, session, run_id, part, batches, most):
        await self.leave.acquire()
        self.appended += 1
        self.arrived.set()
        await asyncio.wrap_future(self.writer.append(session, run_id, part, _arrived(batches)))

    async def _write_all(self, ends):
        stored = [self.writer.submit(end.run, _arrived(end.batches), end.part) for end in ends]
        return await asyncio.gather(*map(asyncio.wrap_future, stored), return_exceptions=True)

    def _abandon(self, session, run_id):
        return self.writer.abandon(session, run_id)


@contextlib.contextmanager
def serving(store: Any, **options: Any):
    replica = ModelReplica.func_or_class(Options(dtype="float32", threads=1, **options), store=store)
    try:
        yield replica
    finally:
        replica.__del__()


def a_job(id: str = "job", max_tokens: int = 4, **capture: Any) -> Job:
    wanted = Capture(points=["norm.output"], **capture)
    fields = {"capture": wanted, "session_id": "s", "max_tokens": max_tokens, "ignore_eos": True}
    return Job(id, prompts=["Tom has 3."], sampling=GREEDY, **fields)


def run(error: Exception, knows: bool = False, **capture):
    with serving(FailingStore(error, knows)) as replica:
        return asyncio.run(replica.complete(a_job(**capture)))


ERRORS = [
    (StoreError("the disk is full: free some room"), "disk is full"),
    (ActorUnavailableError("the store", None), "store"),
]


@pytest.mark.parametrize(("error", "reason"), ERRORS)
def test_an_answer_comes_without_its_activations_and_says_why(error, reason):
    messages = run(error)
    assert isinstance(messages[-1], End)
    assert messages[-1].completion_tokens > 0
    assert messages[-1].run.status == "failed"
    assert reason in messages[-1].run.reason


def test_each_prompt_of_a_list_has_the_hash_that_it_has_alone(tmp_path):
    lone, several = ["Tom has 3."], ["Tom has 3.", [5, 6]]
    store = SlowStore(tmp_path)
    with serving(store) as replica:
        for id, prompts, n in (("alone", lone, 1), ("list", several, 2)):
            asyncio.run(replica.complete(replace(a_job(id), prompts=prompts, n=n)))
    store.writer.close()
    hashes = [run.messages_hash for run in runs(tmp_path / "_" / "s")]
    first, second = (hashlib.sha256(json.dumps([prompt]).encode()).hexdigest() for prompt in several)
    assert hashes == [first, first, first, second, second]


def test_a_request_that_requires_its_activations_fails_with_them():
    messages = run(StoreError("the disk is full: free some room"), required=True)
    assert isinstance(messages[-1], Refusal)
    assert (messages[-1].status, messages[-1].field) == (503, "capture")
    assert "disk is full" in messages[-1].message


@pytest.mark.parametrize(("error", "reason"), [*ERRORS, (TimeoutError(), "does not answer")])
def test_a_request_that_requires_its_activations_does_not_run_where_they_cannot_be_stored(error, reason):
    [refusal] = run(error, knows=True, required=True)
    assert (refusal.status, refusal.code, refusal.field) == (503, "store_unavailable", "capture.required")
    assert reason in refusal.message


ROW = 4 * 192  # bytes
SHARE = 40 * ROW  # a request's rows go out by tens of tokens, and it stands still at forty


def test_a_disk_that_is_slow_slows_the_request_that_records_and_no_other(tmp_path):
    async def scene(replica, store):
        recording = asyncio.ensure_future(replica.complete(a_job("recording", 150)))
        for i in range(3):  # others come and go meanwhile
            plain = await replica.complete(replace(a_job(f"plain{i}", 40), capture=None))
            assert plain[-1].completion_tokens == 40
        numbers = await replica.statistics()
        assert not recording.done()
        assert numbers["running"] == 1
        assert 0 < numbers["capture_bytes"] <= SHARE + 64 * ROW  # its share, and what one window adds
        for _ in range(200):
            store.leave.release()
        return (await recording)[-1]

    async def whole():
        store = SlowStore(tmp_path)
        with serving(store, capture_memory_bytes=SHARE) as replica:
            return await scene(replica, store), store

    end, store = asyncio.run(whole())
    assert end.run.status == "stored"
    assert store.appended > 1
    (place,) = end.run.points.values()
    stored = read_run(place["uri"], end.run.run_id)
    assert stored["norm.output"].shape == tuple(place["shape"]) == (end.prompt_tokens + 150, 192)
    assert stored.positions.tolist() == list(range(end.prompt_tokens + 150))


def test_runs_are_listed_by_request_and_choice_not_by_their_ends(tmp_path):
    early, late = a_job("b"), replace(a_job("a"), n=12)  # of twelve choices names sort otherwise than numbers

    async def scene():
        with serving(SlowStore(tmp_path)) as replica:
            for job in (late, early):
                await replica.complete(job)

    asyncio.run(scene())
    asked = ["run-b-0", *(f"run-a-{index}" for index in range(12))]
    assert [facts.run_id for facts in runs(tmp_path / "_" / "s")] == asked
    index = Index.scanned(tmp_path)
    assert [run["run_id"] for run in index.runs()] == asked
    pages = [index.runs(limit=5, after=after) for after in (None, "run-a-3", "run-a-8")]
    assert [run["run_id"] for page in pages for run in page] == asked


def test_a_run_whose_client_goes_leaves_nothing_in_the_store_and_frees_its_memory(tmp_path):
    async def scene():
        store = SlowStore(tmp_path)
        with serving(store, capture_memory_bytes=SHARE) as replica:
            going = asyncio.ensure_future(replica.complete(a_job("going", 200)))
            store.leave.release()
            await store.arrived.wait()
            going.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await going
            for _ in range(200):
                store.leave.release()
            last = (await replica.complete(a_job("next", 80)))[-1]

            async def is_freed() -> bool:  # by the engine's next step
                return not (await replica.statistics())["capture_bytes"]

            await wait_until(is_freed)
            return last

    last = asyncio.run(scene())
    assert last.run.status == "stored"
    assert [facts.run_id for facts in runs(tmp_path / "_" / "s")] == [last.run.run_id]


def test_the_runs_of_a_second_attempt_have_names_of_their_own(tmp_path):
    store = SlowStore(tmp_path)
    with serving(store) as replica:
        messages = asyncio.run(replica.complete(replace(a_job(), attempt=1)))
    (end,) = (message for message in messages if isinstance(message, End))
    assert (end.run.run_id, end.run.status) == ("run-job-0-1", "stored")
    store.writer.close()
    assert [facts.run_id for facts in runs(tmp_path / "_" / "s")] == ["run-job-0-1"]


def test_more_last_rows_than_can_be_held_until_the_end_are_refused(tmp_path):
    with serving(SlowStore(tmp_path), capture_memory_bytes=SHARE) as replica:
        (refused,) = asyncio.run(replica.complete(a_job(max_tokens=300, tokens={"last": 250})))
    assert (refused.status, refused.field) == (400, "capture.tokens")
    assert str(SHARE // 2) in refused.message


def test_there_is_one_copy_of_the_weights():
    replica = ModelReplica.func_or_class(Options(dtype="float32", threads=1), store=object())
    hf, traced = replica._model.hf, replica._model.nnsight._module
    assert traced is hf
    assert hf.lm_head.weight.data_ptr() == hf.model.embed_tokens.weight.data_ptr()
    replica.__del__()
