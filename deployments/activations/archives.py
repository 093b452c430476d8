"""Zip archives of stored entries, whose length is known before anything of them is read: npz and pt files are such."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_ZIP64 = struct.Struct("<HHQQ")
_PADDING = struct.Struct("<HH")
_DESCRIPTOR = struct.Struct("<IIQQ")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_CENTRAL_ZIP64 = struct.Struct("<HHQQQ")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_VERSION = 45  # the first with sizes of 64 bits, which all entries have here
_FLAGS = 0x0808  # the checksum follows the data; names are UTF-8
_DATE = 0x21  # 1980-01-01: the same runs give the same bytes
_UNKNOWN16, _UNKNOWN32 = 0xFFFF, 0xFFFFFFFF  # stands in the extra field
_ALIGNMENT = 64  # as torch's own files, so that tensors may be mapped


class File(NamedTuple):
    """One file of an archive.

    Attributes:
        name: Its name.
        size: Its bytes.
        parts: Begins to read them.
    """

    name: str
    size: int
    parts: Callable[[], Iterable[bytes | memoryview]]


def length(files: Sequence[File]) -> int:
    """The bytes of their archive."""
    end = 0
    for file in files:
        end += len(_head(file, end)) + file.size + _DESCRIPTOR.size
    central = sum(_CENTRAL.size + len(file.name.encode()) + _CENTRAL_ZIP64.size for file in files)
    return end + central + _END64.size + _LOCATOR.size + _END.size


def archive(files: Sequence[File]) -> Iterator[bytes | memoryview]:
    """The archive of files, piece by piece."""
    place, central = 0, list[bytes]()
    for file in files:
        head, checksum = _head(file, place), 0
        yield head
        for part in file.parts():
            checksum = zlib.crc32(part, checksum)
            yield part
        yield _DESCRIPTOR.pack(0x08074B50, checksum, file.size, file.size)
        central.append(_listed(file, checksum, place))
        place += len(head) + file.size + _DESCRIPTOR.size
    directory = b"".join(central)
    count, size = len(files), len(directory)
    yield directory
    yield _END64.pack(0x06064B50, _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, place)
    yield _LOCATOR.pack(0x07064B50, 0, place + size, 1)
    yield _END.pack(0x06054B50, 0, 0, _UNKNOWN16, _UNKNOWN16, _UNKNOWN32, _UNKNOWN32, 0)


def _head(file: File, place: int) -> bytes:
    """What stands before a file's data, which begin at a multiple of the alignment."""
    name = file.name.encode()
    extra = _ZIP64.size + _PADDING.size
    padding = -(place + _LOCAL.size + len(name) + extra) % _ALIGNMENT
    fixed = (0x04034B50, _VERSION, _FLAGS, 0, 0, _DATE, 0, _UNKNOWN32, _UNKNOWN32, len(name), extra + padding)
    zip64 = _ZIP64.pack(1, _ZIP64.size - 4, file.size, file.size)
    return _LOCAL.pack(*fixed) + name + zip64 + _PADDING.pack(0x4246, padding) + b"Z" * padding


def _listed(file: File, checksum: int, place: int) -> bytes:
    """A file's entry in the directory at the archive's end."""
    name = file.name.encode()
    known = (0x02014B50, _VERSION, _VERSION, _FLAGS, 0, 0, _DATE, checksum, _UNKNOWN32, _UNKNOWN32)
    fixed = (*known, len(name), _CENTRAL_ZIP64.size, 0, 0, 0, 0, _UNKNOWN32)
    return _CENTRAL.pack(*fixed) + name + _CENTRAL_ZIP64.pack(1, _CENTRAL_ZIP64.size - 4, file.size, file.size, place)
