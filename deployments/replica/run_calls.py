"""Calls that send ends of runs to the store: those that wait for each other go together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

from deployments.activations.facts import RunEnd, StoredRun

CALLS = 2  # at the same time, so that runs that end one by one do not wait for each other to be durable
PATIENCE_S = 0.25  # of runs that wait for a call: one may take long, until a run is archived or a node answers
MOST_RUNS = 64  # of a call


class _Waiting(NamedTuple):
    end: RunEnd
    stored: asyncio.Future[StoredRun]


class RunCalls:
    """Sends ends of runs to the store.

    A call costs the replica, Ray and the store 3 ms of processor time, and many runs may end in one step.
    """

    def __init__(self, store: Any) -> None:
        """Open no call yet.

        Args:
            store: The actor that receives runs.
        """
        self._store = store
        self._waiting: list[_Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself does not keep them
        self._senders = 0

    async def write(self, end: RunEnd) -> StoredRun:
        """Send a run's end; it is durable when this returns.

        Raises:
            StoreError: The store cannot take it; or its errors over Ray.
        """
        waiting = _Waiting(end, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._senders < CALLS:
            self._senders += 1
            self._started(self._send())
        return await waiting.stored

    def _started(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send(self) -> None:
        """Send what waits, one call after another, unless a call takes long."""
        try:
            while self._waiting:
                together, self._waiting = self._waiting[:MOST_RUNS], self._waiting[MOST_RUNS:]
                await asyncio.wait({self._started(self._call(together))}, timeout=PATIENCE_S)
        finally:
            self._senders -= 1

    async def _call(self, together: Sequence[_Waiting]) -> None:
        results: list[StoredRun | Exception]
        try:
            results = await self._store.write_all.remote([waiting.end for waiting in together])
        except Exception as error:  # noqa: BLE001 - each run raises it
            results = [error] * len(together)
        for waiting, result in zip(together, results, strict=True):
            if waiting.stored.done():  # its request was cancelled
                continue
            if isinstance(result, Exception):
                waiting.stored.set_exception(result)
            else:
                waiting.stored.set_result(result)
