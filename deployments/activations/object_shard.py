"""A shard in object storage, which cannot append: an object for the runs of one commit, or for one long run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from deployments.activations.checksums import checksums, written
from deployments.activations.entries import Entry, StoredFile
from deployments.activations.facts import RunFacts
from deployments.activations.objects import ObjectFile
from deployments.activations.schema import batch_metadata, empty_batch, kind_of, point_types

_PART = 16 << 20  # bytes that are uploaded at once, and held in memory until then


class ObjectShard:
    """What `Shard` is on a disk. `sync` ends it: the object is there from then on, and never changes.

    Attributes:
        session_id: The session it belongs to.
        schema: Of all its batches.
        rows: Rows of whole runs in it.
        length: Bytes up to the end of the last whole run, the footer included once sealed.
        broken: Whether it takes no more runs.
        sealed: Whether the object is there.
        unsynced: Always 0: there is nothing to make durable before the end.
    """

    unsynced = 0

    def __init__(self, file: ObjectFile, session_id: str, schema: pa.Schema) -> None:
        self.session_id = session_id
        self.schema = schema
        self.rows = self.length = 0
        self.broken = self.sealed = False
        self._ending = False  # the object is being ended, perhaps on another thread
        self._ended = 0  # its length then
        self._torn = False  # a write failed, and bytes may be missing in what is uploaded
        self._file = file
        self._points = point_types(schema)
        self._kind = kind_of(schema)
        self._batches = self._new_rows = 0  # of the run that is not finished
        self._whole = 0  # batches of whole runs
        self._stream = file.fs.open_output_stream(file.path, buffer_size=_PART)
        self._writer: Any = pa.ipc.new_file(self._stream, schema)

    @property
    def size(self) -> int:
        """Bytes in the object, those of a run that is not finished included."""
        return self.length if self.broken else int(self._stream.tell())

    def facts(self) -> StoredFile:
        """The file as it is."""
        modified_ns = 0 if self.sealed else None
        return StoredFile(self._file.uri, self.length, self.sealed, self.rows, modified_ns, self._kind)

    def append(self, run_id: str, batches: Sequence[pa.RecordBatch], sums: Sequence[Mapping[str, str]] = ()) -> None:
        """Write more of the run at the end, or begin one; it counts once it is finished.

        Raises:
            OSError: If the store refuses; the shard is then broken.
        """
        self._write(batches, batch_metadata(run_id, self._batches, len(batches)), sums)

    def finish(self, run: RunFacts, batches: Sequence[pa.RecordBatch], sums: Sequence[Mapping[str, str]] = ()) -> Entry:
        """Write the last batches, if any, of the run at the end; not durable before `sync`.

        Raises:
            OSError: As for `append`.
        """
        batches = batches or [empty_batch(self.schema)]
        self._write(batches, batch_metadata(run.run_id, self._batches, len(batches), run), sums)
        size = self._stream.tell() - self.length
        entry = Entry(run, self._file.uri, self.rows, self._new_rows, size, self._points, self._whole)
        self.rows += self._new_rows
        self.length = self._stream.tell()
        self._whole += self._batches
        self._batches = self._new_rows = 0
        return entry

    def rewind(self) -> None:
        """Give up the run at the end that is not finished, and take no other: readers pass over what there is of it."""
        if self._batches:
            self._batches = self._new_rows = 0
            self.broken = True

    def begin_sync(self) -> None:
        """End the object with the runs in it; nothing while only a long run is under way."""
        self._ending = not self.sealed and (self._torn or not self._batches)
        self.broken = self.broken or self._ending

    def sync(self) -> None:
        """Make the runs in it durable, and the object whole; on any thread.

        Raises:
            OSError: If that failed, or a write before did: `fall_back` then.
        """
        if not self._ending:
            return
        try:
            self._end()
        except pa.ArrowException as error:
            raise OSError(f"{self._file} could not be ended: {error}") from error

    def end_sync(self) -> None:
        """It is durable."""
        if self._ending:
            self.length, self.sealed, self._ending = self._ended, True, False

    def fall_back(self) -> None:
        """It cannot be made durable: none of its runs is stored."""
        self.broken = self._torn = True
        self.rows = self.length = 0
        self._remove()

    def _end(self) -> None:
        if self._torn:
            raise OSError(f"an upload to {self._file} failed on the way")
        self._writer.close()
        self._ended = self._stream.tell()
        self._stream.close()
        size = self._file.fs.get_file_info(self._file.path).size
        if size != self._ended:
            raise OSError(f"{self._file} has {size} bytes of the {self._ended} that were written")

    def close(self) -> None:
        """Let go of it; an object that no run is in is removed."""
        self.rewind()
        if not self.sealed:
            self._remove()

    def _remove(self) -> None:
        """What cannot be removed stays: an object without a footer, which readers and the catalogue pass over."""
        with contextlib.suppress(OSError, pa.ArrowException):  # an upload cannot be given up, only ended
            self._stream.close()
        with contextlib.suppress(OSError, pa.ArrowException):
            self._file.remove()

    def _write(
        self, batches: Sequence[pa.RecordBatch], metadata: Sequence[dict[str, str]], sums: Sequence[Mapping[str, str]]
    ) -> None:
        try:
            for number, (batch, facts) in enumerate(zip(batches, metadata, strict=True)):
                own = sums[number] if sums else checksums(batch)
                self._writer.write_batch(batch, custom_metadata=facts | written(own))
        except (OSError, pa.ArrowException):
            self.broken = self._torn = True
            raise
        self._batches += len(batches)
        self._new_rows += sum(batch.num_rows for batch in batches)
