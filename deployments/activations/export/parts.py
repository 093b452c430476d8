"""A file made of parts of known sizes that are computed on demand, so that any byte range can be read alone."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

Buffer = bytes | bytearray | memoryview
_DESCRIPTOR = struct.Struct("<IIQQ")
_PADDING = struct.Struct("<HH")
_SIZES_FOLLOW = 0x08  # flag: sizes and checksum are behind the data
_ALIGNMENT = 64  # as in torch's own files, so that tensors can be mapped


class Part(NamedTuple):
    """`size` bytes of a file; `read(first, end)` gives those from `first` to `end`."""

    size: int
    read: Callable[[int, int], Iterable[Buffer]]

    @classmethod
    def known(cls, data: Buffer) -> Part:
        """Bytes in memory."""
        return cls(len(data), lambda first, end: [data[first:end]])

    @classmethod
    def made(cls, size: int, make: Callable[[], bytes]) -> Part:
        """A few bytes that `make` computes when they are read."""
        return cls(size, lambda first, end: [make()[first:end]])


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
        end = self.length if end is None else min(end, self.length)
        for number in range(bisect_right(self._ends, first), len(self._parts)):
            part = self._parts[number]
            begins = self._ends[number] - part.size
            if begins >= end:
                return
            yield from part.read(max(first - begins, 0), min(end - begins, part.size))


def archive(files: Iterable[tuple[str, Parts]]) -> Parts:
    """An uncompressed zip file of named files, as npz and pt files are.

    Each file's checksum follows its data; it is computed when it is first read, and cached.
    """
    at, parts, listed = 0, list[Part](), list[tuple[zipfile.ZipInfo, Callable[[], int]]]()
    for name, data in files:
        info = zipfile.ZipInfo(name)  # dated 1980-01-01: the same runs give the same bytes
        info.flag_bits, info.header_offset, info.CRC = _SIZES_FOLLOW, at, 0
        padding = -(at + len(info.FileHeader(zip64=True)) + _PADDING.size) % _ALIGNMENT
        info.extra = _PADDING.pack(0x4246, padding) + b"Z" * padding
        head, checksum = info.FileHeader(zip64=True), cache(partial(_checksum, data))
        info.file_size = info.compress_size = data.length
        descriptor = Part.made(_DESCRIPTOR.size, partial(_descriptor, data.length, checksum))
        parts += [Part.known(head), Part(data.length, data.read), descriptor]
        listed.append((info, checksum))
        at += len(head) + data.length + _DESCRIPTOR.size
    size = len(_directory(at, [info for info, _ in listed]))
    return Parts([*parts, Part.made(size, partial(_whole_directory, at, listed))])


def _checksum(data: Parts) -> int:
    checksum = 0
    for piece in data.read():
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _descriptor(size: int, checksum: Callable[[], int]) -> bytes:
    return _DESCRIPTOR.pack(0x08074B50, checksum(), size, size)


def _whole_directory(at: int, listed: Sequence[tuple[zipfile.ZipInfo, Callable[[], int]]]) -> bytes:
    for info, checksum in listed:
        info.CRC = checksum()
    return _directory(at, [info for info, _ in listed])


def _directory(at: int, listed: list[zipfile.ZipInfo]) -> bytes:
    """The central directory of a zip file, which begins at byte `at` of it."""
    end = _End(at)
    with zipfile.ZipFile(end, "w") as made:
        made.filelist = listed
    return end.getvalue()


class _End(io.BytesIO):
    """The end of a file whose first `at` bytes are elsewhere."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def tell(self) -> int:
        return self._at + super().tell()

    def seek(self, at: int, whence: int = io.SEEK_SET) -> int:
        raise io.UnsupportedOperation("seek")
