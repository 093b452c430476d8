"""What a writer is asked for: the items of its queue, and whether they can be served at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import pyarrow as pa

from deployments.activations.facts import RunName, StoredRun, StoreError, check_session_id
from deployments.activations.segments.schema import owner
from deployments.activations.writer.open_runs import Chunk


class Append(NamedTuple):
    """More of a run that is not finished."""

    chunk: Chunk
    future: Future[None]


class Write(NamedTuple):
    """A whole run, or the end of one."""

    chunk: Chunk
    future: Future[StoredRun]


class Abandon(NamedTuple):
    """The end of a run that will not be finished."""

    name: RunName
    future: Future[None]


class Task(NamedTuple):
    """What is done behind the commits of a round, or, where it needs nothing of them, in its turn."""

    work: Callable[[], Any]
    future: Future[Any]
    at_once: bool = False


def check_name(session_id: str) -> None:
    """Raise StoreError unless `session_id` may name a session."""
    try:
        check_session_id(session_id)
    except ValueError as error:
        raise StoreError(str(error)) from error


def check_batches(name: RunName, batches: Sequence[pa.RecordBatch], model: str | None = None) -> None:
    """Raise StoreError unless the batches are of one schema, and of the session and model."""
    check_name(name.session_id)
    for schema in (batch.schema for batch in batches[:1]):
        try:
            session_id, of_model = owner(schema)
        except ValueError as error:
            raise StoreError(str(error)) from error
        if session_id != name.session_id or model not in (None, of_model):
            raise StoreError(f"Run {name.run_id} and its batches are not of one session and model")
        if not all(batch.schema.equals(schema, check_metadata=True) for batch in batches):
            raise StoreError(f"Run {name.run_id}: its batches differ in points, shapes or dtypes")
