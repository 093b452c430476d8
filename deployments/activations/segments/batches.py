"""The record batches of one segment: sealed, still open or truncated, on disk or in object storage.

A segment is an Arrow file, read as a stream up to its footer. Metadata is read at once. Values are read when they are
needed, from a map of the file or as byte ranges. Every function raises OSError if the file cannot be read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from deployments.activations.files.places import Bytes, DamagedError, DiskFile, File
from deployments.activations.segments.schema import batch_facts
from deployments.points.names import COLUMNS

# An Arrow IPC file is this, padded to 8 bytes, a stream, and a footer once it is sealed.
_MAGIC = b"ARROW1\0\0"
_CONTINUES = b"\xff\xff\xff\xff"  # begins each message
_END = b"\0\0\0\0"  # the length of the message that ends a stream
_COPIED = 1 << 16  # values below this many bytes of a batch are copied at once
_MOST_HEAD = 128 << 20  # bytes of a batch's metadata
_GAP = 32 << 10  # bytes that are fetched along rather than by another request

AnyFile = File | str | os.PathLike[str]


class Batch:
    """A record batch of a segment, at bytes `begin` to `end`; large values are read when they are asked for.

    `view` is the batch over the segment's map or, if `blank`, over blank memory; `opened` is the file, open.
    """

    def __init__(
        self,
        file: File,
        opened: Bytes,
        view: pa.RecordBatch,
        metadata: Mapping[bytes, bytes] | None,
        begin: int,
        end: int,
        blank: bool,
    ) -> None:
        self.schema, self.num_rows = view.schema, view.num_rows
        self.metadata: Mapping[bytes, bytes] = metadata or {}
        self.begin, self.end = begin, end
        self._file, self._opened, self._view, self._blank = file, opened, view, blank

    def __getitem__(self, name: str) -> Any:
        return self.select([name])[name]

    def select(self, names: Sequence[str] | None = None, whole: bool = True) -> pa.RecordBatch:
        """These columns, by default all; DamagedError if their values are outside of the batch, or cut off.

        Without `whole`, points may have blank values of the right length; `place` gives their byte offsets.
        """
        names = self.schema.names if names is None else list(names)
        batch = self._read(names, whole)
        with self._guarded():
            rows = batch.select(names)
            rows.validate(full=True)  # Arrow trusts a file's metadata, and would crash the process
        return rows

    def check(self) -> None:
        """Raise DamagedError if buffers are shorter than the metadata says; no value is read."""
        with self._guarded():
            self._view.validate()

    def read(self, at: int, count: int) -> memoryview:
        """`count` bytes of the segment from offset `at` within this batch; DamagedError if it is cut short."""
        self._opened.check(self.end)
        mapped = self._opened.mapped(at, count)
        data = memoryview(bytearray(self._opened.read(at, count))) if mapped is None else mapped
        if len(data) < count:
            raise DamagedError(f"{self._file}: it is cut short: it ends before byte {at + count}")
        return data

    def place(self, column: pa.Array, width: int = 0) -> int:
        """The byte offset of a column's contiguous values; DamagedError if they are less than `width` bytes a row."""
        values = column.buffers()[-1]
        if column.null_count or values is None or values.size < width * len(column):
            raise DamagedError(f"{self._file}: a batch has not all values of a column")
        root = _root(values)
        return int(self.end - root.size + values.address - root.address)

    def places(self, rows: pa.RecordBatch) -> dict[int, int]:
        """`place` of all points of what `select` gave, by the values' addresses in memory."""
        points = [rows[name] for name in rows.schema.names if name not in COLUMNS]
        return {column.buffers()[-1].address: self.place(column) for column in points}

    def _read(self, names: Sequence[str], whole: bool) -> pa.RecordBatch:
        self._opened.check(self.end)
        if not self._blank:
            return self._view
        stream = _Stream(self._opened)
        try:
            with self._guarded():
                reader = pa.ipc.open_stream(stream)
                if stream.position < self.begin:
                    reader.read_next_batch()  # dictionaries come with the first batch
                    stream.position = self.begin
                stream.filled = self._ranges(names, whole)
                return reader.read_next_batch()
        except OSError as error:
            if stream.error:
                raise stream.error from None
            raise DamagedError(f"{self._file}: {error}") from error

    def _ranges(self, names: Iterable[str], whole: bool) -> list[tuple[int, int]]:
        """The ranges of bytes, relative to the batch's values, that hold these columns."""
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

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, ValueError, KeyError, StopIteration) as error:
            raise DamagedError(f"{self._file}: {error}") from error


def as_file(source: AnyFile) -> File:
    """A file as it is, or the one of a local path."""
    return source if isinstance(source, File) else DiskFile(Path(source))


def batches_of(source: AnyFile, offset: int = 0) -> Iterator[Batch]:
    """The record batches of a segment from a byte offset up to where it ends or is cut off; no tensor is read."""
    file = as_file(source)
    with closing(file.open()) as opened:
        if opened.read(0, len(_MAGIC)) == _MAGIC:
            yield from _of_stream(file, opened, _Stream(opened), offset)


def ends_cut(path: Path, offset: int) -> bool:
    """Whether a local file, from a byte offset on, is at most one run that was cut off; else its bytes were changed."""
    file = DiskFile(path)
    with closing(file.open()) as opened:
        begins = opened.read(0, len(_MAGIC))
        if begins != _MAGIC:
            return _MAGIC.startswith(begins)
        stream, runs = _Stream(opened), set[str]()
        for batch in _of_stream(file, opened, stream, offset):
            try:
                facts = batch_facts(batch.metadata)
            except ValueError:
                return False
            if facts.run:
                return False  # it had been whole
            runs.add(facts.run_id)
        return (stream.short or stream.closes) and len(runs) <= 1


def _of_stream(file: File, opened: Bytes, stream: _Stream, offset: int) -> Iterator[Batch]:
    try:
        reader = pa.ipc.open_stream(stream)
        if offset:
            reader.read_next_batch()  # dictionaries come with the first batch
            stream.position = offset
        while True:
            begin = stream.position
            view, metadata = reader.read_next_batch_with_custom_metadata()
            yield Batch(file, opened, view, metadata, begin, stream.position, stream.blank)
    except StopIteration:
        return
    except (pa.ArrowException, ValueError, OSError):
        if stream.error:
            raise stream.error from None
        return  # a message that the end of the file cuts off: nothing after it counts


class _Stream:
    """A file object from which Arrow reads a segment's stream: metadata is copied, and values are not.

    Values are views of the map; where there is none, blank memory that takes no pages, except for the ranges of the
    next batch's values in `filled`. `short`: the last read went beyond the end; `closes`: it ended the stream.
    """

    closed = False

    def __init__(self, opened: Bytes) -> None:
        self._opened = opened
        self.position = len(_MAGIC)
        self.short = self.closes = self.blank = False
        self.filled: Sequence[tuple[int, int]] | None = None
        self.error: OSError | None = None
        self._is_head = False  # whether a batch's metadata comes next

    def read(self, size: int) -> bytearray | memoryview:
        if self._is_head and size > _MOST_HEAD:
            size = 0  # the length is damaged
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
        memory = np.zeros(size, np.uint8)  # takes pages only as they are filled
        for begin, end in self.filled:
            data = self._copied(self.position + begin, end - begin)
            memory[begin : begin + len(data)] = data
        return memory.data

    def _copied(self, at: int, count: int) -> bytearray:
        """A writable copy of bytes of the file."""
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
        """The file is closed by the one who opened it."""


@lru_cache(64)
def _blank(bits: int) -> memoryview:
    """Memory that is never touched, and so takes no pages, shared by all batches that are not read yet."""
    return memoryview(mmap.mmap(-1, 1 << bits, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ))


def _root(buffer: pa.Buffer) -> pa.Buffer:
    """The memory with all of a batch's values, of which a buffer is a part."""
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer
