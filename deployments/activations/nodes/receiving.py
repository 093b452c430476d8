"""What a replica sends its runs to: the calls that the store and each node's writer share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from deployments.activations.facts import RunEnd, RunFacts, StoredRun, StoreError

if TYPE_CHECKING:  # Serve's controller and the ingress import this module too, and need no Arrow
    from deployments.activations.writer.writer import Writer


class StartingError(StoreError):
    """The store has not started yet."""


class RunReceiver:
    """The actor that a replica sends its runs to: the store on its own node, else the node's writer.

    A batch comes as it is, if it is small, or as a reference, in a list, so that Ray passes it on unresolved.
    """

    _begin_writer: Callable[[], Writer]
    _writer: Writer
    _node_name: str | None = None  # of the node on whose own disk the runs are
    _opened = True  # whether there is a writer

    def _writing(self) -> Writer:
        """The writer. One that ended by an error is replaced; its callers have got the error."""
        if not self._writer.alive:
            self._writer = self._begin_writer()
        return self._writer

    async def append(
        self, session_id: str, run_id: str, part: int, batches: list[Any], most: int = 0, fence: str | None = None
    ) -> None:
        """Take more of a run that is not finished, as `Writer.append`; not durable yet when it answers."""
        await self._admit(session_id, run_id, fence)
        found = await _fetch(run_id, batches)
        await asyncio.wrap_future(self._writing().append(session_id, run_id, part, found, most, fence))

    async def write(self, run: RunFacts, batches: list[Any], part: int = 0, fence: str | None = None) -> StoredRun:
        """Store a run, or the end of one, as `Writer.submit`; durable when it answers."""
        await self._admit(run.session_id, run.run_id, fence)
        found = await _fetch(run.run_id, batches)
        stored = await asyncio.wrap_future(self._writing().submit(run, found, part, fence))
        return stored._replace(node=self._node_name)

    async def write_all(self, ends: list[RunEnd]) -> list[StoredRun | Exception]:
        """As `write`, for several runs: what it returns or raises for each."""
        done = await asyncio.gather(*(self.write(*end) for end in ends), return_exceptions=True)
        return [result if isinstance(result, StoredRun) else _sendable(result) for result in done]

    async def _admit(self, session_id: str, run_id: str, fence: str | None) -> None:
        """Raise StoreError if the session may get no run here; parts of the run that are there are dropped."""
        return  # the store has checks of its own

    async def abandon(self, session_id: str, run_id: str) -> None:
        """As `Writer.abandon`."""
        if self._opened:
            await asyncio.wrap_future(self._writing().abandon(session_id, run_id))

    async def withdraw(self, session_id: str, run_ids: Sequence[str]) -> bool:
        """As `Writer.withdraw`."""
        return not self._opened or await asyncio.wrap_future(self._writing().withdraw(session_id, run_ids))

    async def renew(self, session_id: str, run_id: str) -> None:
        """As `Writer.renew`."""
        if self._opened:
            await asyncio.wrap_future(self._writing().renew(session_id, run_id))


class Home(NamedTuple):
    """Where the store is: its node's id in Ray, its directory's `mark`, and its `hold` of the directory's lock."""

    node: str
    mark: str
    hold: str


async def _fetch(run_id: str, batches: Sequence[Any]) -> list[Any]:
    import pyarrow as pa  # only the actor needs it

    try:
        return [batch if isinstance(batch, pa.RecordBatch) else await batch for batch in batches]
    except ray.exceptions.RayError as error:
        raise StoreError(
            f"The activations of run {run_id} were lost before they were stored "
            f"({type(error).__name__}): send the request again."
        ) from error


def _sendable(error: BaseException) -> Exception:
    """An error as it can be returned; its caller knows those of the store and of Ray."""
    if isinstance(error, StoreError | ValueError | ray.exceptions.RayError):
        return error
    return StoreError(f"{type(error).__name__}: {error}")


async def awaited(answer: Awaitable[Any]) -> Any:
    """A reference of Ray's as a coroutine, which asyncio's limits of time take."""
    return await answer
