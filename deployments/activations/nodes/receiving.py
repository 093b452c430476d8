"""What a replica sends its runs to: the calls that the store and each node's writer share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from deployments.activations.facts import RunEnd, RunInfo, SessionName, StoredRun, StoreError

if TYPE_CHECKING:  # Serve's controller and the ingress import this module too, and need no Arrow
    from deployments.activations.writer.writer import Writer


class RunReceiver:
    """The actor that a replica sends its runs to: the store, or the writer of the replica's node.

    A batch comes as it is, if it is small, or as a reference, in a list, so that Ray passes it on unresolved.
    """

    _writer: Writer

    async def ready(self) -> None:
        """Return once it can be used."""

    async def append(self, session: SessionName, run_id: str, part: int, batches: list[Any], most: int = 0) -> None:
        """Take more of a run that is not finished, as `Writer.append`; not durable yet when it answers."""
        found = await _fetch(run_id, batches)
        await self._admit(session, run_id, found)
        await asyncio.wrap_future(self._writer.append(session, run_id, part, found, most))

    async def write(self, run: RunInfo, batches: list[Any], part: int = 0) -> StoredRun:
        """Store a run, or the end of one, as `Writer.submit`; durable when it answers."""
        found = await _fetch(run.run_id, batches)
        await self._admit(run.session, run.run_id, found)
        return await asyncio.wrap_future(self._writer.submit(run, found, part))

    async def write_all(self, ends: list[RunEnd]) -> list[StoredRun | Exception]:
        """As `write`, for several runs: what it returns or raises for each."""
        done = await asyncio.gather(*(self.write(*end) for end in ends), return_exceptions=True)
        return [result if isinstance(result, StoredRun) else _sendable(result) for result in done]

    async def _admit(self, session: SessionName, run_id: str, batches: Sequence[Any]) -> None:
        """Raise StoreError if the session may not get these; parts of the run that are there are dropped."""
        return  # the store's writer checks by itself

    async def abandon(self, session: SessionName, run_id: str) -> None:
        """As `Writer.abandon`."""
        await asyncio.wrap_future(self._writer.abandon(session, run_id))

    async def withdraw(self, session: SessionName, run_ids: Sequence[str]) -> bool:
        """As `Writer.withdraw`."""
        return await asyncio.wrap_future(self._writer.withdraw(session, run_ids))


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


def end_process() -> None:
    """End this actor, whose writer has failed: callers that wait get an error, and Ray starts it again."""
    os._exit(1)
