"""The record batches and whole runs of one segment, be it sealed, still open or cut short, wherever it lies.

A segment is an Arrow file, read as the stream that it is up to its footer. What describes batches is read, and the
values of a column when they are asked for: from a map, or as ranges of bytes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from deployments.activations.facts import PointType, RunFacts
from deployments.activations.files.places import Bytes, DamagedError, DiskFile, File
from deployments.activations.segments import checksums
from deployments.activations.segments.schema import batch_facts, point_types
from deployments.points.names import COLUMNS

# An Arrow IPC file is this, padded to 8 bytes, a stream, and a footer once it is sealed.
_MAGIC = b"ARROW1\0\0"
_CONTINUES = b"\xff\xff\xff\xff"  # begins each message
_END = b"\0\0\0\0"  # the length of the message that is none
_COPIED = 1 << 16  # values below this many bytes of a batch are copied at once
_MOST_HEAD = 128 << 20  # bytes that describe a batch, with what its run is
_GAP = 32 << 10  # bytes that are fetched along rather than by another request

AnyFile = File | str | os.PathLike[str]

_T = TypeVar("_T")


class Batch:
    """A record batch of a segment, of which no large value is read before it is asked for.

    Attributes:
        schema: Of all its columns.
        num_rows: Its rows.
        begin: The byte of its segment where its message begins.
        end: The byte behind it.
    """

    def __init__(self, file: File, opened: Bytes, view: pa.RecordBatch, begin: int, end: int, blank: bool) -> None:
        """A batch by what describes it.

        Args:
            file: Its segment.
            opened: The same, open.
            view: The batch over the segment's map, or over blank memory.
            begin: As the attribute.
            end: As the attribute.
            blank: Whether that memory is blank.
        """
        self.schema = view.schema
        self.num_rows = view.num_rows
        self.begin, self.end = begin, end
        self._file, self._opened, self._view, self._blank = file, opened, view, blank

    def __getitem__(self, name: str) -> Any:
        return self.select([name])[name]

    def select(self, names: Sequence[str] | None = None) -> pa.RecordBatch:
        """These columns, in this order, or all of them.

        Raises:
            DamagedError: Their values lie outside of the batch, or it is cut off.
            OSError: They cannot be read.
        """
        names = self.schema.names if names is None else names
        return self._checked(names, whole=True)

    def outline(self, names: Sequence[str]) -> pa.RecordBatch:
        """The same, but that the values of points may be blank: they are as long, and lie where `place` says.

        Raises:
            DamagedError: Values lie outside of the batch, or it is cut off.
            OSError: The others cannot be read.
        """
        return self._checked(names, whole=False)

    def check(self) -> None:
        """Refuse a batch whose buffers are shorter than it says; no value is looked at.

        Raises:
            DamagedError: It is such.
        """
        self._guarded(self._view.validate)

    def read(self, at: int, count: int) -> memoryview:
        """Bytes of the segment, which lie in this batch.

        Raises:
            DamagedError: The segment is cut short.
            OSError: They cannot be read.
        """
        self._opened.check(self.end)
        mapped = self._opened.mapped(at, count)
        data = memoryview(bytearray(self._opened.read(at, count))) if mapped is None else mapped
        if len(data) < count:
            raise DamagedError(f"{self._file}: it is cut short: it ends before byte {at + count}")
        return data

    def place(self, column: pa.Array, width: int = 0) -> int:
        """The byte of the segment where the values of a column begin, one behind the other.

        Args:
            column: Of what `select` or `outline` gave.
            width: The least bytes of a row.

        Raises:
            DamagedError: It has not as many bytes, or gaps.
        """
        values = column.buffers()[-1]
        if column.null_count or values is None or values.size < width * len(column):
            raise DamagedError(f"{self._file}: a batch has not all values of a column")
        root = _root(values)
        return int(self.end - root.size + values.address - root.address)

    def places(self, rows: pa.RecordBatch) -> dict[int, int]:
        """The same of all points of what `outline` gave, by the values' addresses in memory."""
        points = [rows[name] for name in rows.schema.names if name not in COLUMNS]
        return {column.buffers()[-1].address: self.place(column) for column in points}

    def _read(self, names: Sequence[str], whole: bool) -> pa.RecordBatch:
        self._opened.check(self.end)
        if not self._blank:
            return self._view
        stream = _Stream(self._opened)

        def again() -> pa.RecordBatch:
            reader = pa.ipc.open_stream(stream)
            if stream.position < self.begin:
                reader.read_next_batch()  # with it come the dictionaries
                stream.position = self.begin
            stream.filled = self._ranges(names, whole)
            return reader.read_next_batch()

        try:
            return self._guarded(again)
        except OSError as error:
            if stream.error:
                raise stream.error from None
            raise DamagedError(f"{self._file}: {error}") from error

    def _ranges(self, names: Iterable[str], whole: bool) -> list[tuple[int, int]]:
        """Which bytes of its values, from where to where, are those of columns."""
        spans = list[tuple[int, int]]()
        for name in names:
            buffers = [buffer for buffer in self._view[name].buffers() if buffer is not None]
            for buffer in buffers if whole or name in COLUMNS else buffers[:-1]:
                begin = buffer.address - _root(buffer).address
                spans.append((begin, begin + buffer.size))
        ranges = list[tuple[int, int]]()
        for begin, end in sorted(spans):
            if ranges and begin - ranges[-1][1] <= _GAP:
                ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
            else:
                ranges.append((begin, end))
        return ranges

    def _checked(self, names: Sequence[str], whole: bool) -> pa.RecordBatch:
        """Arrow trusts what a file says, and would end the process."""
        batch = self._read(names, whole)

        def select() -> pa.RecordBatch:
            rows = batch.select(list(names))
            rows.validate(full=True)
            return rows

        return self._guarded(select)

    def _guarded(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except (pa.ArrowException, ValueError, KeyError, StopIteration) as error:
            raise DamagedError(f"{self._file}: {error}") from error


class Message(NamedTuple):
    """A record batch of a segment, its own metadata, and the byte behind it."""

    batch: Batch
    metadata: Mapping[bytes, bytes] | None
    end: int


class WholeRun(NamedTuple):
    """A run all of whose batches are in a segment.

    Attributes:
        facts: What the run is.
        first_row: The number of its first row there.
        bytes: What it takes there; that of the first run takes in the file's schema.
        batches: Those of its batches that have rows, in order.
        sums: The batches' checksums.
        types: The points that are meant; all that it recorded, where it is not said otherwise.
        file: The segment.
        offset: The byte of it where what is counted begins.
        batch: The number of its first batch, counted from where reading began.
        intact: Whether `facts` are those that were written, as far as is known.
    """

    facts: RunFacts
    first_row: int
    bytes: int
    batches: list[Batch]
    sums: list[dict[str, str]]
    types: Mapping[str, PointType]
    file: File
    offset: int
    batch: int
    intact: bool

    @property
    def rows(self) -> int:
        """Captured tokens."""
        return sum(batch.num_rows for batch in self.batches)


def messages(source: AnyFile, offset: int = 0) -> Iterator[Message]:
    """The record batches of one segment up to where it ends or is cut off, those before a byte left out.

    No tensor is read.

    Raises:
        OSError: It cannot be read.
    """
    file = as_file(source)
    with closing(file.open()) as opened:
        if opened.read(0, len(_MAGIC)) == _MAGIC:
            yield from _of_stream(file, opened, _Stream(opened), offset)


def whole_runs(source: AnyFile, offset: int = 0) -> Iterator[WholeRun]:
    """The whole runs of one segment; no tensor is read. A run without its end, or short of batches, is left out.

    Args:
        source: The segment.
        offset: The byte where a run begins; those before it are left out, and rows count from there.

    Raises:
        OSError: It cannot be read.
        DamagedError: What it says of its points cannot be; names the file.
    """
    file = as_file(source)
    rows = first_row = seen = first_batch = 0
    start = offset
    run_id, batches, sums = "", list[Batch](), list[dict[str, str]]()
    types: Mapping[str, PointType] | None = None  # all runs of a segment have the same points
    for number, message in enumerate(messages(file, offset)):
        try:
            facts = batch_facts(message.metadata)
            own = checksums.read(message.metadata, message.batch.schema.names)
        except ValueError:
            return  # none of ours: nothing behind it counts
        if facts.number == 0:
            run_id, first_row, batches, sums, seen, first_batch = facts.run_id, rows, [], [], 0, number
        seen += 1
        rows += message.batch.num_rows
        if message.batch.num_rows:
            batches.append(message.batch)
            sums.append(own)
        if facts.run and facts.run_id == run_id and facts.number + 1 == facts.batches == seen and batches:
            types = _types(file, message.batch.schema) if types is None else types
            size, intact = message.end - start, checksums.is_of_run(message.metadata or {})
            yield WholeRun(facts.run, first_row, size, batches, sums, types, file, start, first_batch, intact)
            start = message.end


def _types(file: File, schema: pa.Schema) -> Mapping[str, PointType]:
    try:
        return point_types(schema)
    except ValueError as error:
        raise DamagedError(f"{file}: {error}") from error


def is_sealed(source: AnyFile) -> bool:
    """Whether a segment has its footer.

    Raises:
        OSError: It cannot be read.
    """
    try:
        footer(source)
    except pa.ArrowException:
        return False
    except OSError as error:
        if _is_disks(error):
            raise
        return False
    return True


def footer(source: AnyFile) -> Any:
    """Arrow's reader by a segment's footer.

    Raises:
        pa.ArrowInvalid: It has none.
        OSError: It cannot be read.
    """
    return pa.ipc.open_file(as_file(source).input())


def ends_cut(path: Path, offset: int) -> bool:
    """Whether a file of a disk ends, behind a place, as one that was cut off in a run; else its bytes were changed.

    Raises:
        OSError: The disk refuses.
    """
    file = DiskFile(path)
    with closing(file.open()) as opened:
        begins = opened.read(0, len(_MAGIC))
        if begins != _MAGIC:
            return _MAGIC.startswith(begins)
        stream, runs = _Stream(opened), set[str]()
        for message in _of_stream(file, opened, stream, offset):
            try:
                facts = batch_facts(message.metadata)
            except ValueError:
                return False
            if facts.run:
                return False  # it had been whole
            runs.add(facts.run_id)
        return (stream.short or stream.closes) and len(runs) <= 1


def as_file(source: AnyFile) -> File:
    """A file as it is, or that of a path of this machine."""
    return source if isinstance(source, File) else DiskFile(Path(source))


def _is_disks(error: OSError) -> bool:
    """Whether an error is the disk's: Arrow raises such errors, too, for what is cut off or is no file of its."""
    return error.errno is not None


def _of_stream(file: File, opened: Bytes, stream: _Stream, offset: int) -> Iterator[Message]:
    try:
        reader = pa.ipc.open_stream(stream)
        if offset:
            reader.read_next_batch()  # with it come the dictionaries
            stream.position = offset
        while True:
            begin = stream.position
            view, metadata = reader.read_next_batch_with_custom_metadata()
            yield Message(Batch(file, opened, view, begin, stream.position, stream.blank), metadata, stream.position)
    except StopIteration:
        return
    except (pa.ArrowException, ValueError, OSError):
        if stream.error:
            raise stream.error from None
        return  # a message that the end of the file cuts off: nothing behind it counts


class _Stream:
    """What Arrow reads a segment's stream from: what describes batches is copied, and their values are not.

    They are views of the map; where there is none, blank memory of which no page is taken, but for the ranges that
    `filled` names.

    Attributes:
        position: Of the next byte.
        short: Whether more was asked for than there is.
        closes: Whether what was read last ends the stream: behind it is a footer, or part of one.
        blank: Whether the last batch's values are blank.
        filled: Which of the next batch's values are fetched, from where to where; None for none.
        error: Why something could not be read.
    """

    closed = False

    def __init__(self, opened: Bytes) -> None:
        self._opened = opened
        self.position = len(_MAGIC)
        self.short = self.closes = self.blank = False
        self.filled: Sequence[tuple[int, int]] | None = None
        self.error: OSError | None = None
        self._is_head = False  # whether what comes next describes a batch

    def read(self, size: int) -> bytearray | memoryview:
        if self._is_head and size > _MOST_HEAD:
            size = 0  # no batch is described by so much: what says it is damaged
        if self._is_head or size < _COPIED:
            data: bytearray | memoryview = self._copied(self.position, size)
            self.blank = False
        else:
            data = self._values(max(0, min(size, self._opened.size - self.position)))
        self.short = len(data) < size
        word = bytes(data) if size == len(_CONTINUES) else None
        self.closes = word == _END
        self._is_head = word not in (None, _CONTINUES)
        self.position += len(data)
        return data

    def _values(self, size: int) -> memoryview:
        mapped = self._opened.mapped(self.position, size)
        if mapped is not None:
            return mapped
        self.blank = self.filled is None
        if self.filled is None:
            return _blank(max(1, size - 1).bit_length())[:size]
        memory = np.zeros(size, np.uint8)  # of which pages are taken as they are filled
        for begin, end in self.filled:
            data = self._copied(self.position + begin, end - begin)
            memory[begin : begin + len(data)] = data
        return memory.data

    def _copied(self, at: int, count: int) -> bytearray:
        """Bytes in memory of their own: what is made of them may be written to."""
        try:
            data = bytearray(self._opened.read(at, count))
            if self.filled is not None and len(data) < count:
                raise OSError(f"it ends before byte {at + count}, and did not when it was opened")
            return data
        except OSError as error:
            self.error = error
            raise

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """The file is closed by whoever opened it."""


@lru_cache(64)
def _blank(bits: int) -> memoryview:
    """Memory that is never touched, and so takes none, for all batches of which nothing is read yet."""
    return memoryview(mmap.mmap(-1, 1 << bits, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ))


def _root(buffer: pa.Buffer) -> pa.Buffer:
    """The memory that a batch's values were read to at once, which a buffer is part of."""
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer
