"""Zip archives of stored entries, of which any range can be made alone: npz and pt files are such."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

from deployments.activations.parts import Part, Parts

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
        data: Its bytes.
    """

    name: str
    data: Parts

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self.data.length


def archive(files: Sequence[File]) -> Parts:
    """The archive of files.

    A checksum stands behind each file, and again at the end: it is computed when it is first asked for, and then known.
    """
    place, parts, listed = 0, list[Part](), list[Part]()
    for file in files:
        head, checksum = _head(file, place), cache(partial(_checksum, file.data))
        parts += [Part.known(head), Part(file.size, file.data.read)]
        parts.append(Part.made(_DESCRIPTOR.size, partial(_descriptor, file, checksum)))
        size = _CENTRAL.size + len(file.name.encode()) + _CENTRAL_ZIP64.size
        listed.append(Part.made(size, partial(_listed, file, checksum, place)))
        place += len(head) + file.size + _DESCRIPTOR.size
    count, size = len(files), sum(part.size for part in listed)
    end = _END64.pack(0x06064B50, _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, place)
    end += _LOCATOR.pack(0x07064B50, 0, place + size, 1)
    end += _END.pack(0x06054B50, 0, 0, _UNKNOWN16, _UNKNOWN16, _UNKNOWN32, _UNKNOWN32, 0)
    return Parts([*parts, *listed, Part.known(end)])


def _checksum(data: Parts) -> int:
    checksum = 0
    for piece in data.read():
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _descriptor(file: File, checksum: Callable[[], int]) -> bytes:
    """What stands behind a file's data."""
    return _DESCRIPTOR.pack(0x08074B50, checksum(), file.size, file.size)


def _head(file: File, place: int) -> bytes:
    """What stands before a file's data, which begin at a multiple of the alignment."""
    name = file.name.encode()
    extra = _ZIP64.size + _PADDING.size
    padding = -(place + _LOCAL.size + len(name) + extra) % _ALIGNMENT
    fixed = (0x04034B50, _VERSION, _FLAGS, 0, 0, _DATE, 0, _UNKNOWN32, _UNKNOWN32, len(name), extra + padding)
    zip64 = _ZIP64.pack(1, _ZIP64.size - 4, file.size, file.size)
    return _LOCAL.pack(*fixed) + name + zip64 + _PADDING.pack(0x4246, padding) + b"Z" * padding


def _listed(file: File, checksum: Callable[[], int], place: int) -> bytes:
    """A file's entry in the directory at the archive's end."""
    name = file.name.encode()
    known = (0x02014B50, _VERSION, _VERSION, _FLAGS, 0, 0, _DATE, checksum(), _UNKNOWN32, _UNKNOWN32)
    fixed = (*known, len(name), _CENTRAL_ZIP64.size, 0, 0, 0, 0, _UNKNOWN32)
    return _CENTRAL.pack(*fixed) + name + _CENTRAL_ZIP64.pack(1, _CENTRAL_ZIP64.size - 4, file.size, file.size, place)
