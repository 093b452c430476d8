"""Ends of runs that wait for each other reach the store in one call, and each gets its own answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from deployments.activations.facts import RunEnd, RunLocation, StoreError
from deployments.replica import runs as run_sending
from deployments.replica.runs import CALLS, MOST_RUNS, RunCalls


class Store:
    """Answers a call once it is let go; a run named `bad` is refused."""

    def __init__(self):
        self.calls = []
        self.write_all = SimpleNamespace(remote=self._write_all)
        self.goes = asyncio.Event()
        self.ended = False

    async def _write_all(self, ends):
        runs = [end.run for end in ends]
        self.calls.append(runs)
        await self.goes.wait()
        if self.ended:
            raise StoreError("the store ended")
        return [StoreError("no room") if run == "bad" else RunLocation(run, {}, 1) for run in runs]


async def sent(calls, *names):
    tasks = [asyncio.ensure_future(calls.write(RunEnd(name, []))) for name in names]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def test_runs_that_wait_go_together_and_one_that_is_refused_or_cancelled_harms_no_other():
    async def go():
        store = Store()
        calls = RunCalls(store)
        first = [task for i in range(CALLS) for task in await sent(calls, f"first{i}")]
        rest = await sent(calls, "a", "bad", "gone", *(f"more{i}" for i in range(MOST_RUNS)))
        rest[2].cancel()
        store.goes.set()
        results = await asyncio.gather(*first, *rest, return_exceptions=True)
        assert [len(call) for call in store.calls] == [1] * CALLS + [MOST_RUNS, 3]
        wrong = [str(result) for result in results if not isinstance(result, RunLocation)]
        assert wrong == ["no room", ""]
        named = [result.run_id for result in results if isinstance(result, RunLocation)]
        assert named == [*(f"first{i}" for i in range(CALLS)), "a", *(f"more{i}" for i in range(MOST_RUNS))]
        assert (await (await sent(calls, "later"))[0]).run_id == "later"

    asyncio.run(go())


def test_a_call_that_takes_long_keeps_no_later_run_waiting(monkeypatch):
    monkeypatch.setattr(run_sending, "PATIENCE_S", 0)

    async def go():
        store = Store()
        calls = RunCalls(store)
        names = [f"run{i}" for i in range(CALLS + 3)]
        tasks = [task for name in names for task in await sent(calls, name)]
        while sum(map(len, store.calls)) < len(names):  # though no call has ended
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        store.goes.set()
        assert [(await task).run_id for task in tasks] == names

    asyncio.run(go())


def test_each_run_of_a_call_that_fails_gets_the_error_and_later_calls_go_on():
    async def go():
        store = Store()
        calls = RunCalls(store)
        tasks = await sent(calls, *(f"run{i}" for i in range(CALLS + 2)))
        store.ended = True
        store.goes.set()
        for task in tasks:
            with pytest.raises(StoreError, match="the store ended"):
                await task
        store.ended = False
        assert (await calls.write(RunEnd("later", []))).run_id == "later"

    asyncio.run(go())
