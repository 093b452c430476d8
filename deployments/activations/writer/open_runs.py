"""Runs that arrive in chunks. Each has its own segment from its first chunk to its last."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from deployments.activations.facts import (
    RunInfo,
    RunLocation,
    RunName,
    SessionName,
    StoreError,
    check_session_id,
    explain,
)
from deployments.activations.index.index import Index
from deployments.activations.segments.schema import file_info
from deployments.activations.segments.segment_writer import Segment
from deployments.activations.writer.group_commit import Commits
from deployments.activations.writer.pool import Pool
from deployments.activations.writer.retention import Retainer

_SYNC_BYTES = 64 << 20  # an open run's bytes are fsynced in pieces of this size, so that no commit waits for gigabytes


class Chunk(NamedTuple):
    """Number `part` of a run's chunks, with `run` on the last one; `most` bytes have all chunks, 0 if unknown."""

    name: RunName
    part: int
    batches: list[pa.RecordBatch]
    run: RunInfo | None
    sums: Sequence[str]
    most: int = 0

    def check(self) -> None:
        """Raise StoreError unless the batches are of one schema, and of the run's session and model."""
        check_name(self.name.session)
        for schema in (batch.schema for batch in self.batches[:1]):
            try:
                segment = file_info(schema)
            except ValueError as error:
                raise StoreError(str(error)) from error
            if segment.session_id != self.name.session.id or (self.run and self.run.model != segment.model):
                raise StoreError(f"Run {self.name.run_id} and its batches are not of one session and model")
            self.check_schema(schema)

    def check_schema(self, schema: pa.Schema) -> None:
        """Raise StoreError unless all batches have this schema."""
        if not all(schema.equals(batch.schema, check_metadata=True) for batch in self.batches):
            raise StoreError(f"Run {self.name.run_id}: its batches differ in points, shapes or dtypes")


@dataclass
class RunWriter:
    """A run that is not finished; `touched` is when its last chunk came, in the monotonic clock's seconds."""

    segment: Segment
    chunks: int = 0
    touched: float = 0.0
    unsynced: int = 0  # bytes


class OpenRuns:
    """The runs that are being written, for one thread; after `lease_s` seconds without a chunk they are given up."""

    def __init__(self, root: Path, index: Index | None, pool: Pool, commits: Commits, lease_s: float) -> None:
        self._root, self._index, self._pool, self._commits, self._lease_s = root, index, pool, commits, lease_s
        self.retainer = Retainer(root, index, pool, self.busy) if index else None
        self._open: OrderedDict[RunName, RunWriter] = OrderedDict()  # the longest without a chunk first
        self._lost: OrderedDict[RunName, tuple[str, float]] = OrderedDict()  # why and when, the oldest first

    @property
    def due(self) -> float:
        """When a run will have been without a chunk for too long, in the monotonic clock's seconds."""
        return next((run.touched for run in self._open.values()), float("inf")) + self._lease_s

    def busy(self) -> set[SessionName]:
        """The sessions of which a run is open, or anything is not durable yet."""
        return {segment.session for segment in self._commits.segments} | {name.session for name in self._open}

    def write(self, chunk: Chunk) -> Future[RunLocation] | None:
        """Write one chunk; the last one's future says that the run is durable. StoreError ends the run."""
        self._check(chunk)
        name, answer = chunk.name, None
        try:
            if self.retainer and self.retainer.limits.has_quotas:  # else counting the bytes would be for nothing
                before = self._open[name].segment if name in self._open else None
                left = chunk.most - (before.size - before.length if before else 0)
                self.retainer.make_room(name.session, sum(batch.nbytes for batch in chunk.batches), left)
            if chunk.part == 0:
                self._open[name] = RunWriter(self._pool.take(name.session, chunk.batches[0].schema))
            run = self._open[name]
            segment, size = run.segment, run.segment.size
            if chunk.run:
                answer = self._commits.add(segment, segment.finish(chunk.run, chunk.batches, chunk.sums))
                self._pool.give_back(self._open.pop(name).segment)
            else:
                segment.append(name.run_id, chunk.batches, chunk.sums)
                run.chunks += 1
                run.touched = time.monotonic()
                run.unsynced += segment.size - size
                self._open.move_to_end(name)
                if run.unsynced >= _SYNC_BYTES:
                    self._commits.add(segment)
                    run.unsynced = 0
            if self.retainer:
                self.retainer.grow(name.session, segment.size - size)
            return answer
        except (OSError, pa.ArrowException) as error:
            reason = explain(self._root, error)
        except StoreError as error:
            reason = error.with_traceback(None)
        self._end(name)
        if not chunk.run:  # there may be more to come
            self._remember(name, str(reason))
        raise reason  # out here without a context, whose frames would keep the batches alive

    def abandon(self, name: RunName, reason: str) -> Segment | None:
        """Take away what there is of an unfinished run, and refuse what comes later; the segment that it was on."""
        if self.is_stored(name):
            return None
        run = self._open.get(name)
        self._end(name)
        self._remember(name, reason)
        return run.segment if run else None

    def abandon_those(self, which: Callable[[RunName, RunWriter], bool], reason: str) -> None:
        """Abandon the open runs for which `which` is true."""
        for name in [name for name, run in self._open.items() if which(name, run)]:
            self.abandon(name, reason)

    def settle(self) -> None:
        """Abandon runs past their lease, and forget those that were abandoned long ago."""
        now = time.monotonic()
        while self._lost and now - next(iter(self._lost.values()))[1] >= self._lease_s:
            self._lost.popitem(last=False)
        while self._open and now - next(iter(self._open.values())).touched >= self._lease_s:
            name = next(iter(self._open))
            self.abandon(name, f"Run {name.run_id} was dropped: no rows of it came for {self._lease_s:g} s.")

    def _check(self, chunk: Chunk) -> None:
        name, run = chunk.name, self._open.get(chunk.name)
        if name in self._lost:
            raise StoreError(self._lost[name][0])
        if run is None and self.is_stored(name):
            raise StoreError(f"Run {name.run_id} is stored already: give it another id")
        if run is None and chunk.part:
            raise StoreError(
                f"Part {chunk.part} of run {name.run_id} came, but the parts before it are gone: "
                "send the request again."
            )
        if run and not chunk.part:
            raise StoreError(f"Run {name.run_id} is being stored already: give it another id")
        if run and run.chunks != chunk.part:
            raise StoreError(
                f"Run {name.run_id} was sent part {chunk.part}; the next part is {run.chunks}: send the request again"
            )
        if run:
            chunk.check_schema(run.segment.schema)

    def is_stored(self, name: RunName) -> bool:
        """Whether a run is complete."""
        return name in self._commits.runs or (self._index is not None and self._index.holds(name))

    def _end(self, name: RunName) -> None:
        if run := self._open.pop(name, None):
            run.segment.rewind()
            self._pool.give_back(run.segment)
        if self.retainer:
            self.retainer.recount()

    def _remember(self, name: RunName, reason: str) -> None:
        self._lost[name] = (reason, time.monotonic())
        self._lost.move_to_end(name)


def check_name(session: SessionName) -> None:
    """Raise StoreError unless the name's id may be a session's."""
    try:
        check_session_id(session.id)
    except ValueError as error:
        raise StoreError(str(error)) from error
