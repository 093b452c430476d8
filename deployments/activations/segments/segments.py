"""Reads one local file, sealed, still written to, or cut short: its record batches, and its complete runs.

A file is an Arrow stream of messages after its first 8 bytes, and a footer once it is sealed. Metadata is read at once.
Values are read when they are asked for; large ones are views of a private map of the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from deployments.activations.facts import PointType, RunInfo, RunRecord
from deployments.activations.segments.schema import batch_info, is_intact, point_types
from vitrine.runs.files import MAGIC

_CONTINUES = b"\xff\xff\xff\xff"  # starts each message
_COPIED = 1 << 16  # values below this many bytes of a batch are copied, and need no map
LATER = {"role": pa.int8(), "turn": pa.int16()}  # columns that files have since format 5
_MOST_HEAD = 128 << 20  # bytes of a batch's metadata


class DamagedError(ValueError):
    """Stored values differ from what was written; the message names them."""


class Batch:
    """A record batch of a file, at its bytes `begin` to `end`; values are read when they are asked for."""

    def __init__(
        self, path: Path, view: pa.RecordBatch, metadata: Mapping[bytes, bytes], span: tuple[int, int], shift: int
    ) -> None:
        self.schema, self.num_rows, self.metadata = view.schema, view.num_rows, metadata
        self.begin, self.end = span
        self._path, self._view, self._shift = path, view, shift

    def __getitem__(self, name: str) -> Any:
        return self.select([name])[name]

    def select(self, names: Sequence[str] | None = None) -> pa.RecordBatch:
        """These columns, by default all; DamagedError if their values are outside of the batch, or cut off.

        Roles and turns are null in files of format 4.
        """
        # To touch a page of the map that the file no longer has would end the process.
        if (size := self._path.stat().st_size) < self.end:
            raise DamagedError(f"{self._path}: it is cut short: it has {size} bytes, and this batch ends at {self.end}")
        try:
            rows = self._view
            for name in LATER.keys() - set(self.schema.names) if names else ():
                rows = rows.append_column(name, pa.nulls(self.num_rows, LATER[name]))
            rows = rows if names is None else rows.select(list(names))
            rows.validate(full=True)  # Arrow trusts a file's metadata, and would crash the process
        except (pa.ArrowException, ValueError, KeyError) as error:
            raise DamagedError(f"{self._path}: {error}") from error
        return rows

    def offset_of(self, column: pa.Array, width: int) -> int:
        """The byte of the file where the values of a column begin that `select` gave.

        DamagedError unless there are `width` bytes for each row, without nulls.
        """
        values = column.buffers()[-1]
        if column.null_count or values is None or values.size < width * len(column):
            raise DamagedError(f"{self._path}: a batch has not all values of a column")
        return int(values.address + self._shift)


def batches_of(path: str | os.PathLike[str], offset: int = 0) -> Iterator[Batch]:
    """The record batches of a file from a byte offset up to where it ends or is cut off.

    OSError if the file cannot be read.
    """
    path = Path(path)
    with path.open("rb", buffering=0) as file:
        stream = _Stream(file)
        if os.pread(file.fileno(), len(MAGIC), 0) != MAGIC:
            return
        try:
            reader = pa.ipc.open_stream(stream)
            if offset:
                reader.read_next_batch()  # dictionaries come with the first batch
                stream.position = offset
            while True:
                begin = stream.position
                view, metadata = reader.read_next_batch_with_custom_metadata()
                yield Batch(path, view, metadata or {}, (begin, stream.position), stream.shift)
        except StopIteration:
            return
        except (pa.ArrowException, ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the disk's, not Arrow's
                raise
            return  # a message that the end of the file cuts off: nothing after it counts


class _Stream:
    """A file object from which Arrow reads a file's stream.

    `shift` is what leads from an address in the values that were read last to their byte of the file.
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self.position, self.shift = len(MAGIC), 0
        self._file = file
        self._map: memoryview | None = None
        self._is_head = False  # whether a batch's metadata comes next

    def read(self, size: int) -> bytearray | memoryview:
        """The next bytes: two words, a batch's metadata, and its values."""
        if self._is_head and size > _MOST_HEAD:
            size = 0  # the length is damaged
        is_word = size == len(_CONTINUES)
        is_copied = self._is_head or size < _COPIED
        data = bytearray(os.pread(self._file.fileno(), size, self.position)) if is_copied else self._mapped(size)
        if not (is_word or self._is_head):
            self.shift = self.position - int(np.frombuffer(data, np.uint8).ctypes.data)
        self._is_head = is_word and bytes(data) != _CONTINUES
        self.position += len(data)
        return data

    def _mapped(self, size: int) -> memoryview:
        if self._map is None:
            # Tensors over a private map may be written to, which does not reach the file.
            self._map = memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY))
        return self._map[self.position : self.position + size]

    def readable(self) -> bool:
        """Whether Arrow may read it: always."""
        return True

    def close(self) -> None:
        """The file is closed by its opener."""


class RunBatches(NamedTuple):
    """A complete run as its record batches in a file; `entry` makes the index's `RunRecord` of it."""

    facts: RunInfo
    first_row: int  # the number of its first row in the file
    bytes: int  # its size there; that of the first run includes the schema
    batches: list[Batch]  # in order; the last one, which says what the run is, may have no rows
    types: Mapping[str, PointType]  # the selected points, by default all
    path: Path
    offset: int  # the byte where it begins

    @property
    def rows(self) -> int:
        """Captured tokens."""
        return sum(batch.num_rows for batch in self.batches)

    def entry(self, path: str, uri: str = "") -> RunRecord:
        """The run as an index lists it; `path` is its file's below the store's directory, `uri` the file's URI."""
        return RunRecord(self.facts, path, self.first_row, self.rows, self.bytes, self.types, self.offset, uri)

    def damage(self) -> list[str]:
        """Read all values, and name the batches that are not as they were written; DamagedError as by `select`."""
        count = len(self.batches)
        return [
            f"batch {number} of {count}"
            for number, batch in enumerate(self.batches)
            if not is_intact(batch.select(), batch.metadata)
        ]


def whole_runs(path: str | os.PathLike[str], offset: int = 0) -> Iterator[RunBatches]:
    """The whole runs of a file from byte `offset` on; rows count from there. DamagedError if another program wrote it.

    OSError if it cannot be read.
    """
    path, start, rows, first_row, run_id = Path(path), offset, 0, 0, ""
    batches, types = list[Batch](), None  # all runs of a file have the same points
    for batch in batches_of(path, offset):
        try:
            facts = batch_info(batch.metadata)
        except ValueError:
            return  # another program's: nothing after it counts
        if facts.number == 0:
            run_id, first_row, batches = facts.run_id, rows, []
        rows += batch.num_rows
        batches.append(batch)
        is_last = facts.run and facts.run_id == run_id and facts.number + 1 == facts.batches == len(batches)
        if facts.run and is_last and batches[0].num_rows:
            try:
                types = types or point_types(batch.schema)
            except ValueError as error:
                raise DamagedError(f"{path}: {error}") from error
            yield RunBatches(facts.run, first_row, batch.end - start, batches, types, path, start)
            start, batches = batch.end, []


def is_sealed(path: str | os.PathLike[str]) -> bool:
    """Whether a file has its footer."""
    return listed_batches(path) is not None


def listed_batches(path: str | os.PathLike[str]) -> int | None:
    """How many batches a file's footer lists; None if it has none. OSError if the disk refuses."""
    try:
        with pa.OSFile(os.fspath(path)) as file:
            return int(pa.ipc.open_file(file).num_record_batches)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's: Arrow raises it for files cut off, too
            raise
        return None
