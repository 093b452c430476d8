"""Writes one segment: an uncompressed Arrow IPC file of complete runs, of which only the last may be unfinished."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from deployments.activations.facts import Entry, RunFacts, StoredFile
from deployments.activations.files.disk import create, directory
from deployments.activations.segments.batches import batches_of
from deployments.activations.segments.checksums import BATCH, described, of_batch
from deployments.activations.segments.schema import batch_metadata, empty_batch, free_batch, point_types

VERSION = "pyarrow"  # of a footer's metadata
_CHUNK = 1 << 20
_GATHERED = 16 << 10  # bytes of small writes that become one: a batch has several a column

Batches = Sequence[pa.RecordBatch]
Sums = Sequence[Mapping[str, str]]  # of each batch, the checksums of its columns


class Segment:
    """One Arrow IPC file of a session, appended to by this process alone.

    It has `rows` and, up to the end of the last whole run, `length` bytes, the footer included once `sealed`; a
    `broken` one takes no more runs.
    """

    def __init__(self, root: Path, session_id: str, name: str, schema: pa.Schema) -> None:
        self.session_id, self.schema = session_id, schema
        self.rows = self.length = 0
        self.broken = self.sealed = False
        self._path = root / session_id / name
        self._points = point_types(schema)
        self._batches = self._new_rows = 0  # of the run that is not finished
        self._descriptor, self._end = _create(root, session_id, name), 0
        self.is_named = False  # whether its name is durable
        self._said = schema.serialize().to_pybytes()  # as it lies in the file
        # Arrow writes to the file itself: a call of Python for each buffer would wait for the lock of the interpreter.
        self._file = pa.OSFile(f"/dev/fd/{self._descriptor}", "ab")
        self._sink = pa.BufferedOutputStream(self._file, _GATHERED)  # empty but for the time of a write
        self._writer = new_file(self._sink, schema)  # writes nothing before the first batch
        self._synced = self._syncing = _WrittenExtent(0, 0, 0)
        self._modified_ns: int | None = None
        self._rewound = False

    @property
    def unsynced(self) -> int:
        """Bytes written since the last `begin_sync`."""
        return self._end - self._syncing.written

    @property
    def size(self) -> int:
        """Bytes in the file, those of a run that is not finished included."""
        return self._end

    @property
    def unfinished(self) -> int:
        """Bytes of the run that is not finished."""
        return self._end - self.length

    def facts(self) -> StoredFile:
        """The file as far as it is durable."""
        return StoredFile(self._path.as_uri(), self._synced.length, self.sealed, self._synced.rows, self._modified_ns)

    def append(self, run_id: str, batches: Batches, sums: Sums = ()) -> None:
        """Write more of the run at the end, or begin one. OSError breaks the segment, which ends with the last run."""
        self._write(batches, batch_metadata(run_id, self._batches, len(batches)), sums)

    def finish(self, run: RunFacts, batches: Batches, sums: Sums = ()) -> Entry:
        """Write the last batches, if any, of the run at the end; not durable before `sync`. Raises as `append`."""
        # The facts need a batch to stand on.
        batches = batches or [empty_batch(self.schema)]
        self._write(batches, batch_metadata(run.run_id, self._batches, len(batches), run), sums)
        size = self._end - self.length
        entry = Entry(run, self._path.as_uri(), self.rows, self._new_rows, size, self._points, self.length)
        self.rows += self._new_rows
        self.length = self._end
        self._batches = self._new_rows = 0
        return entry

    def rewind(self) -> None:
        """Take away the run at the end that is not finished; a segment with no other is broken."""
        if self._batches and not self.broken:
            self._cut(self.length, self.rows)
            self._rewound = True
            self.broken = not self.rows or self._end != self.length

    @property
    def in_place(self) -> bool:
        """Whether its name still leads to the file, so that who writes to it now is read; else it is broken."""
        try:
            self._check_place()
        except OSError:
            self.broken = True
        return not self.broken

    def begin_sync(self) -> None:
        """What is written by now is what `sync` makes durable."""
        self._syncing = _WrittenExtent(self.length, self.rows, self._end)

    def sync(self) -> None:
        """Make it and its name durable, while more is written; after an OSError call `fall_back`."""
        os.fsync(self._descriptor)
        if not self.is_named:
            with directory(self._path.parent) as folder:
                os.fsync(folder)
        self._check_place()
        self._modified_ns = os.fstat(self._descriptor).st_mtime_ns

    def end_sync(self) -> None:
        """It is durable."""
        self._synced = self._syncing
        self.is_named = True

    def fall_back(self) -> None:
        """It cannot be made durable: take no more runs, and end with those that were before."""
        self.broken = True
        self._cut(self._synced.length, self._synced.rows)

    def close(self) -> None:
        """Seal the file, or remove it if no run is in it. A broken one reads as a stream as it is."""
        self.rewind()
        try:
            if not self.broken:
                if self._rewound:  # the writer's footer would list what was taken away
                    seal(self._descriptor, self._path, self.schema, self.length)
                else:
                    self._writer.close()
                    self._sink.flush()
                os.fsync(self._descriptor)
                state = os.fstat(self._descriptor)
                self.length = self._end = state.st_size
                self.sealed, self._modified_ns = True, state.st_mtime_ns
                self.begin_sync()
                self.end_sync()
        except (OSError, pa.ArrowException):  # its runs are durable all the same; only the footer is missing
            self._discard_partial_write()
        with contextlib.suppress(OSError, pa.ArrowException):  # what counts was fsynced before
            try:
                if not self.rows:
                    self._path.unlink()
            finally:
                os.close(self._descriptor)
                self._sink.close()

    def _write(self, batches: Batches, metadata: Sequence[dict[str, str]], sums: Sums) -> None:
        try:
            for number, (batch, facts) in enumerate(zip(batches, metadata, strict=True)):
                said = {**facts, **(sums[number] if sums else described(batch))}
                rows = batch if self._end or number else free_batch(batch)
                self._writer.write_batch(rows, custom_metadata=said | {BATCH: of_batch(self._said, said)})
            self._sink.flush()
            self._end = os.fstat(self._descriptor).st_size
        except (OSError, pa.ArrowException):
            self.broken = True
            self._discard_partial_write()
            raise
        self._batches += len(batches)
        self._new_rows += sum(batch.num_rows for batch in batches)

    def _discard_partial_write(self) -> None:
        """Cut the file after its last whole run."""
        # First close it: the sink may hold a part of the failed write, and would append that later.
        with contextlib.suppress(OSError, pa.ArrowException):
            self._file.close()
        self._cut(self.length, self.rows)

    def _check_place(self) -> None:
        """Raise OSError if the file's name no longer leads to it: its content would be lost."""
        gone = FileNotFoundError(errno.ENOENT, "the file or its directory was removed", str(self._path))
        try:
            if not os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path)):
                raise gone
        except (FileNotFoundError, NotADirectoryError):
            raise gone from None

    def _cut(self, length: int, rows: int) -> None:
        self.length, self.rows = length, rows
        self._batches = self._new_rows = 0
        if not rows:
            return  # its space is freed when it is closed: open readers are not affected
        # Where even this fails, readers still know that the run at the end is not whole.
        with contextlib.suppress(OSError):
            os.truncate(self._descriptor, length)
            self._end = length
            self._syncing = self._syncing._replace(written=min(self._syncing.written, length))


class _WrittenExtent(NamedTuple):
    """How far a file was written."""

    length: int  # bytes of whole runs
    rows: int  # of whole runs
    written: int  # bytes, those of a run that is not finished included


class ComparingWriter(io.RawIOBase):
    """A sink for Arrow: it compares with the first `length` bytes of a file, and writes what follows to `rest`.

    `same` is whether all bytes were alike; without `rest`, there may be no more.
    """

    def __init__(self, file: BinaryIO, length: int, rest: BinaryIO | None = None) -> None:
        self.same, self.length = True, 0
        self._file, self._there, self._rest = file, length, rest

    def writable(self) -> bool:
        """That it is."""
        return True

    def write(self, data: Any) -> None:
        """Compare, or write, what comes next."""
        view = memoryview(data).cast("B")
        there = max(0, min(len(view), self._there - self.length))
        for at in range(0, there, _CHUNK):
            piece = view[at : min(at + _CHUNK, there)]
            self.same = self._file.read(len(piece)) == piece and self.same
        if self._rest:
            self._rest.write(view[there:])
        self.same = self.same and (self._rest is not None or there == len(view))
        self.length += len(view)


def new_file(sink: Any, schema: pa.Schema, version: str = pa.__version__) -> Any:
    """Arrow's writer of a file, whose footer says the version of Arrow: by the same, a file is written alike."""
    return pa.ipc.new_file(sink, schema, metadata={VERSION: version, BATCH: of_batch(b"", {VERSION: version})})


def seal(descriptor: int, path: Path, schema: pa.Schema, length: int) -> None:
    """Write a footer after `length` bytes; ArrowInvalid if this version of Arrow frames the batches otherwise.

    Where it writes other bytes than there are, another version wrote them: then the footer names no version.
    """
    for version in (pa.__version__, "another"):
        with open(descriptor, "wb", closefd=False) as file, path.open("rb") as there:
            os.lseek(descriptor, length, os.SEEK_SET)
            sink = ComparingWriter(there, length, file)
            writer = new_file(sink, schema, version)
            for batch in batches_of(path):
                writer.write_batch(batch.select(), custom_metadata=batch.metadata)
            if sink.length != length:
                raise pa.ArrowInvalid(f"{path} does not read back as it was written")
            if sink.same or version != pa.__version__:
                writer.close()
                return


def _create(root: Path, session_id: str, name: str) -> int:
    """Create and hold a file that did not exist, following no link below the root; its name is not durable yet."""
    with directory(root) as top:
        with contextlib.suppress(FileExistsError):
            os.mkdir(session_id, dir_fd=top)
        with directory(session_id, top) as folder:
            return create(name, folder)
