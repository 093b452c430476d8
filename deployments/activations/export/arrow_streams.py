"""Stored runs as Arrow IPC streams; any byte range can be read without the rest."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import pyarrow as pa

from deployments.activations.facts import StoreError
from deployments.activations.files.places import File
from deployments.activations.reader.selection import Wanted, by_schema, select
from deployments.activations.segments.batches import Batch
from deployments.activations.segments.checksums import written
from deployments.activations.segments.schema import batch_metadata
from deployments.activations.segments.segments import WholeRun
from deployments.points.names import COLUMNS

Buffer = bytes | bytearray | memoryview


class Part(NamedTuple):
    """`size` bytes of a file; `read(first, end)` gives those from `first` to `end`."""

    size: int
    read: Callable[[int, int], Iterable[Buffer]]

    @classmethod
    def known(cls, data: Buffer) -> Part:
        """Bytes in memory."""
        return cls(len(data), lambda first, end: [data[first:end]])


class Parts:
    """Concatenated parts; `length` is their total size in bytes."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = list(parts)
        self._ends = list(accumulate(part.size for part in self._parts))
        self.length = self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return len(self._parts)

    def read(self, first: int = 0, end: int | None = None) -> Iterator[Buffer]:
        """The bytes from `first` to `end`, by default all; only the parts that overlap are read."""
        end = self.length if end is None else end
        for number in range(bisect_right(self._ends, first), len(self._parts)):
            part = self._parts[number]
            begins = self._ends[number] - part.size
            if begins >= end:
                return
            yield from part.read(max(first - begins, 0), min(end - begins, part.size))


def as_arrow(files: Sequence[File], wanted: Wanted, left: set[str] | None = None) -> Parts:
    """Concatenated Arrow IPC streams, each with all wanted runs of one schema.

    Each batch's metadata names its run, and a run's last one has its facts. Only the lengths of batches are in memory:
    a run is looked up in its file again when it is read. `left` is as for `select`.
    """
    parts = list[Part]()
    for _, group in by_schema(files):
        sink, writer = _Sink(), None
        for run in select(group, wanted, left):
            sizes = list[int]()
            for number in range(len(run.batches)):
                rows, metadata = _outline(run, number)
                writer = writer or pa.ipc.new_stream(sink, rows.schema)
                writer.write_batch(rows, custom_metadata=metadata)
                sizes.append(sum(part.size for part in sink.taken()))
            alone = wanted._replace(runs={run.facts.run_id}, offsets={run.file: run.offset})
            parts.append(Part(sum(sizes), partial(_messages, run.file, alone, tuple(sizes))))
        if writer:
            writer.close()
            parts += sink.taken()
    return Parts(parts)


class _Sink(io.RawIOBase):
    """A file object for Arrow that collects parts; values of points stay in the batch, at their `places` by address."""

    def __init__(self, batch: Batch | None = None, places: Mapping[int, int] | None = None) -> None:
        self._parts = list[Part]()
        self._batch, self._places = batch, places or {}

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        batch, at = self._batch, self._places.get(data.address) if isinstance(data, pa.Buffer) else None
        if batch is None or at is None:
            self._parts.append(Part.known(view))
        else:
            self._parts.append(Part(len(view), lambda first, end: [batch.read(at + first, end - first)]))

    def taken(self) -> list[Part]:
        """What was written since the last call."""
        parts, self._parts = self._parts, []
        return parts


def _outline(run: WholeRun, number: int) -> tuple[pa.RecordBatch, dict[str, str]]:
    """A batch of a run with the wanted points, without their values, and its metadata."""
    batch, sums = run.batches[number], run.sums[number]
    names = [name for name in batch.schema.names if name in COLUMNS or name in run.types]
    is_last = number + 1 == len(run.batches)
    (metadata,) = batch_metadata(run.facts.run_id, number, 1, run.facts if is_last else None)
    return batch.select(names, whole=False), metadata | written({name: sums[name] for name in names if name in sums})


def _messages(file: File, wanted: Wanted, sizes: Sequence[int], first: int, end: int) -> Iterator[Buffer]:
    """Bytes of a run's messages in a stream, by the messages' sizes; StoreError if the run has changed."""
    run = next(select([file], wanted), None)
    if run is None or len(run.batches) != len(sizes):
        raise StoreError(f"{file} changed while it was read")
    begins = 0
    for number, size in enumerate(sizes):
        if begins < end and first < begins + size:
            rows, metadata = _outline(run, number)
            sink = _Sink(batch := run.batches[number], batch.places(rows))
            writer = pa.ipc.new_stream(sink, rows.schema)
            writer.write_batch(rows, custom_metadata=metadata)
            alone = Parts(sink.taken())
            writer.close()
            # A new stream begins with the schema and the dictionary of phases, which the real one has had before.
            before = alone.length - size
            yield from alone.read(before + max(first - begins, 0), before + min(end - begins, size))
        begins += size
