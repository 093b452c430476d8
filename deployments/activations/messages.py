"""The record batches of stored files, one by one: of files that are sealed, still open or cut short, and of objects."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from deployments.activations.objects import AnyFile, FetchedBatch, ObjectFile, Place
from deployments.activations.schema import batch_facts

# An Arrow IPC file is this, padded to 8 bytes, a stream, and a footer once it is sealed.
_MAGIC = b"ARROW1\0\0"
_END = b"\0\0\0\0"  # the length of the message that is none
_COPIED = 1 << 16  # reads below this many bytes, and so what Arrow says of a batch, are no views of the map


class DamagedError(ValueError):
    """Stored values that are not those that were written; the message says which."""


class Message(NamedTuple):
    """A record batch of a file (of an object, what fetches its columns), its own metadata, and the place behind it."""

    batch: pa.RecordBatch | FetchedBatch
    metadata: Mapping[bytes, bytes] | None
    end: int


def messages(path: AnyFile, offset: int = 0) -> Iterator[Message]:
    """The record batches of one file up to where it ends or is cut off, those before a place left out.

    No tensor is read.

    Raises:
        OSError: The disk or the store refuses.
        DamagedError: A batch of an object cannot be read: objects are there whole, and cut off nowhere.
    """
    return _of_disk(path, offset) if isinstance(path, Path) else _of_object(path, offset)


def _of_object(file: ObjectFile, offset: int) -> Iterator[Message]:
    try:
        if file.reader().schema.get_field_index("position") < 0:
            return
    except pa.ArrowInvalid:
        return  # no file of ours
    try:
        for number, (batch, metadata) in enumerate(file.batches(offset), offset + 1):
            yield Message(batch, metadata, number)
    except pa.ArrowInvalid as error:
        raise DamagedError(f"{file}: a batch cannot be read: {error}") from error


def check_size(file: AnyFile, end: int) -> None:
    """Refuse to read a file of a disk, or what is mapped of it, that was cut short since it was looked at.

    Args:
        file: The file; objects are there whole.
        end: The least bytes that it must have.

    Raises:
        DamagedError: It has less.
        FileNotFoundError: It is gone.
    """
    if isinstance(file, Path) and (size := file.stat().st_size) < end:
        raise DamagedError(f"{file}: it is cut short: it has {size} bytes, and what is read ends at {end}")


def check_batches(file: AnyFile | Place, batches: Iterable[pa.RecordBatch | FetchedBatch]) -> None:
    """Refuse batches whose values lie outside of them: Arrow trusts what their file says, and would end the process.

    Raises:
        DamagedError: One is such; names the file.
    """
    try:
        for batch in batches:
            if isinstance(batch, pa.RecordBatch):  # others are checked when they are fetched
                batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DamagedError(f"{file}: {error}") from error


def ends_cut(path: Path, offset: int) -> bool:
    """Whether a file of a disk ends, behind a place, as one that was cut off in a run; else its bytes were changed.

    Raises:
        OSError: The disk refuses.
    """
    with path.open("rb") as file:
        begins = file.read(len(_MAGIC))
        if begins != _MAGIC:
            return _MAGIC.startswith(begins)
        stream, runs = _Stream(file), set[str]()
        for message in _of_stream(stream, offset):
            try:
                facts = batch_facts(message.metadata)
            except ValueError:
                return False
            if facts.run:
                return False  # it had been whole
            runs.add(facts.run_id)
        return (stream.short or stream.closes) and len(runs) <= 1


def is_disks(error: OSError) -> bool:
    """Whether an error is the disk's: Arrow raises such errors, too, for what is cut off or is no file of its."""
    return error.errno is not None


def _of_disk(path: Path, offset: int) -> Iterator[Message]:
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            yield from _of_stream(_Stream(file), offset)


def _of_stream(stream: _Stream, offset: int) -> Iterator[Message]:
    try:
        reader = pa.ipc.open_stream(stream)
        if offset:
            reader.read_next_batch()  # with it come the dictionaries
            stream.position = offset
        while True:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            yield Message(batch, metadata, stream.position)
    except StopIteration:
        return
    except (pa.ArrowException, ValueError):
        return  # a message that the end of the file cuts off: nothing behind it counts
    except OSError as error:
        if is_disks(error):
            raise


class _Stream:
    """What Arrow reads a file's stream from: tensors are views of a map, what describes them is copied.

    The map is private and copies on write: torch cannot keep a caller from writing to a tensor, and on a
    read-only map that would end the process. So would touching a page of it that the file no longer has. A writer
    cuts runs off that will not be finished: until a run is known to be whole, it is read without the map.
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._map = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        self.position = len(_MAGIC)
        self.short = False  # whether more was asked for than there is
        self.closes = False  # whether what was read last ends the stream: behind it is a footer, or part of one

    def read(self, size: int) -> memoryview:
        data = self._map[self.position : self.position + size]
        self.short = len(data) < size
        if len(data) < _COPIED:
            copy = bytearray(len(data))
            data = memoryview(copy)[: os.preadv(self._file.fileno(), [copy], self.position)]
        self.closes = len(data) == len(_END) and bytes(data) == _END
        self.position += len(data)
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """The file is closed by whoever opened it."""
