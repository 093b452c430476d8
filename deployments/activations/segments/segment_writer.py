"""Writes one segment: an uncompressed Arrow IPC file of complete runs, of which only the last may be unfinished."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from deployments.activations.facts import RunInfo, RunRecord, SessionName, StoredFile
from deployments.activations.files.disk import NEW, create, directory
from deployments.activations.segments.schema import (
    CHECKSUM,
    batch_metadata,
    checksum,
    empty_batch,
    free_batch,
    of_content,
    point_types,
)
from deployments.activations.segments.segments import Batch, DamagedError, whole_runs

_GATHERED = 16 << 10  # bytes of small writes that become one: a batch has several a column

Batches = Sequence[pa.RecordBatch]


class Segment:
    """One Arrow IPC file of a session, appended to by this process alone.

    It has `rows` and, up to the end of the last whole run, `length` bytes, the footer included once `sealed`; `size`
    are all its bytes, with those of a run that is not finished. A `broken` one takes no more runs.
    """

    def __init__(self, root: Path, session: SessionName, name: str, schema: pa.Schema) -> None:
        self.session, self.schema, self.path = session, schema, f"{session.folder}/{name}"
        self.rows = self.length = self.size = 0
        self.broken = self.sealed = False
        self._root, self._file_path = root, root / session.folder / name
        self._uri = self._file_path.as_uri()
        self._points = point_types(schema)
        self._batches = self._new_rows = 0  # of the run that is not finished
        self._descriptor = _create(root, session, name)
        self.is_named = False  # whether its name is durable
        # Arrow writes to the file itself: a call of Python for each buffer would wait for the lock of the interpreter.
        self._file = pa.OSFile(f"/dev/fd/{self._descriptor}", "ab")
        self._sink = pa.BufferedOutputStream(self._file, _GATHERED)  # empty but for the time of a write
        self._writer = pa.ipc.new_file(self._sink, schema)  # writes nothing before the first batch
        self._synced = self._syncing = (0, 0)  # `length` and `rows`
        self._modified_ns: int | None = None
        self._rewound = False

    def facts(self) -> StoredFile:
        """The file as far as it is durable."""
        length, rows = self._synced
        return StoredFile(self.path, length, self.sealed, rows, self._modified_ns)

    def append(self, run_id: str, batches: Batches, sums: Sequence[str] = ()) -> None:
        """Write more of the last run, or start one. OSError breaks the segment, which ends with the last whole run.

        `sums` are the batches' checksums of `of_content`, if they are known.
        """
        self._write(batches, batch_metadata(run_id, self._batches, len(batches)), sums)

    def finish(self, run: RunInfo, batches: Batches, sums: Sequence[str] = ()) -> RunRecord:
        """Write the last batches, if any, of the last run; not durable before `sync`. Raises as `append`."""
        batches = batches or [empty_batch(self.schema)]  # the facts need a batch to stand on
        self._write(batches, batch_metadata(run.run_id, self._batches, len(batches), run), sums)
        size = self.size - self.length
        entry = RunRecord(run, self.path, self.rows, self._new_rows, size, self._points, self.length, self._uri)
        self.rows += self._new_rows
        self.length = self.size
        self._batches = self._new_rows = 0
        return entry

    def rewind(self) -> None:
        """Take away the last run if it is not finished; a segment with no other is broken."""
        if self._batches and not self.broken:
            self._cut(self.length, self.rows)
            self._rewound = True
            self.broken = not self.rows or self.size != self.length

    @property
    def in_place(self) -> bool:
        """Whether its name still leads to the file: else what is written would be lost."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._file_path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def begin_sync(self) -> None:
        """What is written by now is what `sync` makes durable."""
        self._syncing = (self.length, self.rows)

    def sync(self) -> None:
        """Make it and its name durable, while more is written; after an OSError call `fall_back`.

        The caller makes the names of the directories above durable.
        """
        os.fsync(self._descriptor)
        if not self.is_named:
            with directory(self._file_path.parent) as folder:
                os.fsync(folder)
        if not self.in_place:
            raise FileNotFoundError(errno.ENOENT, "the file or its directory was removed", str(self._file_path))
        self._modified_ns = os.fstat(self._descriptor).st_mtime_ns

    def end_sync(self) -> None:
        """What `begin_sync` marked is durable."""
        self._synced = self._syncing
        self.is_named = True

    def fall_back(self) -> None:
        """It cannot be made durable: take no more runs, and end with those that were durable before."""
        self.broken = True
        self._cut(*self._synced)

    def close(self) -> None:
        """Seal the file, or remove it if no run is in it. A broken one reads as a stream as it is."""
        self.rewind()
        try:
            if not self.broken:
                if self._rewound:  # the footer of this writer would list what was taken away
                    batches = (batch for run in whole_runs(self._file_path) for batch in run.batches)
                    rewrite(self._file_path, self.schema, batches, self._root)
                else:
                    self._writer.close()
                    self._sink.flush()
                    os.fsync(self._descriptor)
                state = self._file_path.stat()
                self.length = self.size = state.st_size
                self.sealed, self._modified_ns = True, state.st_mtime_ns
                self._synced = (self.length, self.rows)
        except (OSError, pa.ArrowException, DamagedError):
            # Its runs are durable all the same; only the footer is missing.
            self._discard_partial_write()
        with contextlib.suppress(OSError, pa.ArrowException):  # what counts was fsynced before
            try:
                if not self.rows:
                    self._file_path.unlink()
            finally:
                os.close(self._descriptor)
                self._sink.close()

    def _write(self, batches: Batches, metadata: Sequence[dict[str, str]], sums: Sequence[str]) -> None:
        try:
            for number, (batch, words) in enumerate(zip(batches, metadata, strict=True)):
                content = sums[number] if sums else of_content(batch)
                rows = batch if self.size or number else free_batch(batch)
                self._writer.write_batch(rows, custom_metadata=words | {CHECKSUM: checksum(content, words)})
            self._sink.flush()
            self.size = os.fstat(self._descriptor).st_size
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

    def _cut(self, length: int, rows: int) -> None:
        self.length, self.rows = length, rows
        self._batches = self._new_rows = 0
        if not rows:
            return  # its space is freed when it is closed: open readers are not affected
        # Where even this fails, readers still know that the last run is not whole.
        with contextlib.suppress(OSError):
            os.truncate(self._descriptor, length)
            self.size = length


def rewrite(path: Path, schema: pa.Schema, batches: Iterable[Batch], folder: Path) -> None:
    """Replace a session's file by a sealed one with these batches of it, made in `folder`; durable when this returns.

    Those who have the old file open keep reading it. OSError if the disk refuses, DamagedError if a batch cannot be
    read; the old file then stays.
    """
    unfinished = folder / f"{NEW}{path.stem}"  # in a store's directory: the next start removes what a crash left
    try:
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch.select(), custom_metadata=batch.metadata)
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        unfinished.replace(path)
        with directory(path.parent) as above:
            os.fsync(above)
    finally:
        unfinished.unlink(missing_ok=True)


def _create(root: Path, session: SessionName, name: str) -> int:
    """Create and lock a file that did not exist, following no link below the root; its name is not durable yet."""
    with contextlib.ExitStack() as folders:
        folder = folders.enter_context(directory(root))
        for below in session.folder.split("/"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(below, dir_fd=folder)
            folder = folders.enter_context(directory(below, folder))
        return create(name, folder)
