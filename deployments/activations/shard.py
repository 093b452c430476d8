"""One shard: an uncompressed Arrow IPC file that only grows until its footer seals it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from deployments.activations.catalogue import Entry, StoredFile
from deployments.activations.facts import RunFacts
from deployments.activations.schema import point_types


class Shard:
    """One Arrow IPC file, appended to by this process alone.

    Attributes:
        session_id: The session whose directory holds it.
        rows: Rows of whole runs in it.
        length: Bytes up to the end of the last whole run, the footer included once sealed.
        broken: Whether it takes no more runs, because the disk refused something.
        sealed: Whether the footer is on disk.
    """

    def __init__(self, root: Path, session_id: str, name: str, schema: pa.Schema) -> None:
        self.session_id = session_id
        self.rows = self.length = 0
        self.broken = self.sealed = False
        self._path = root / session_id / name
        self._points = point_types(schema)
        self._sink = _Sink(_create(root, session_id, name))
        self._writer = pa.ipc.new_file(self._sink, schema)  # writes nothing before the first batch
        self._synced = (0, 0)  # length and rows

    def facts(self) -> StoredFile:
        """The file as it is."""
        return StoredFile(self._path.as_uri(), self.length, self.sealed)

    def append(self, run: RunFacts, batches: Sequence[pa.RecordBatch], metadata: Sequence[dict[str, str]]) -> Entry:
        """Write one run behind the last; not durable before `sync`.

        Raises:
            OSError: If the disk refuses; the shard is then broken, and ends with the run before.
        """
        first_row, start = self.rows, self.length
        try:
            for batch, facts in zip(batches, metadata, strict=True):
                self._writer.write_batch(batch, custom_metadata=facts)
        except (OSError, pa.ArrowException):
            self._cut(start, first_row)
            raise
        rows = sum(batch.num_rows for batch in batches)
        self.rows, self.length = first_row + rows, self._sink.length
        return Entry(run, self._path.as_uri(), first_row, rows, self.length - start, self._points)

    def sync(self) -> None:
        """Make all runs appended so far durable.

        Raises:
            OSError: If that failed; the shard is then broken, and ends where it was last synced, since
                what a failed fsync left behind cannot be known.
        """
        try:
            os.fsync(self._sink.descriptor)
            if not os.fstat(self._sink.descriptor).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "somebody removed the file", str(self._path))
        except OSError:
            self._cut(*self._synced)
            raise
        self._synced = (self.length, self.rows)

    def close(self) -> None:
        """Seal the file, or remove it if no run is in it. A broken one reads as a stream as it is."""
        try:
            if not self.broken:
                self._writer.close()
                os.fsync(self._sink.descriptor)
                self.length, self.sealed = self._sink.length, True
        except OSError:  # its runs are durable all the same; only the footer is missing
            self._cut(self.length, self.rows)
        with contextlib.suppress(OSError):  # what counts was fsynced before
            os.close(self._sink.descriptor)
            if not self.rows:
                self._path.unlink()

    def _cut(self, length: int, rows: int) -> None:
        self.broken = True
        self.length, self.rows = length, rows
        # Where even this fails, readers still know a torn run by its count of batches.
        with contextlib.suppress(OSError):
            os.truncate(self._sink.descriptor, length)


class _Sink:
    """What Arrow writes to: a descriptor, with every short write carried on."""

    closed = False

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.length = 0

    def write(self, data: bytes) -> None:
        view = memoryview(data).cast("B")
        while view:
            done = os.write(self.descriptor, view)
            self.length += done
            view = view[done:]

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The shard closes its descriptor itself."""


def _create(root: Path, session_id: str, name: str) -> int:
    """Create a file that did not exist, following no link below the root, and make its name durable."""
    with directory(root) as top:
        with contextlib.suppress(FileExistsError):
            os.mkdir(session_id, dir_fd=top)
        os.fsync(top)
        with directory(session_id, top) as folder:
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
            try:
                os.fsync(folder)
            except OSError:
                os.close(file)
                raise
            return file


@contextlib.contextmanager
def directory(path: str | Path, parent: int | None = None) -> Iterator[int]:
    """The descriptor of a directory that is not a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
