"""Files and directories on disk or in object storage, read by byte ranges.

A `Place` is a directory and a `File` a file of any `pyarrow.fs` file system; `Directory` and `DiskFile` are local ones.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import posixpath
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from deployments.activations.facts import public_uri, store_id
from deployments.options import check_uri

_BLOCK = 32 << 10  # bytes; larger reads are requests of their own
_BLOCKS = 64  # of one file that are cached
_PIECE = 8 << 20  # bytes that are fetched by one request
_DISK = pafs.LocalFileSystem()
ATTEMPTS = 5  # of each request to S3, with growing pauses


class DamagedError(ValueError):
    """Stored values differ from what was written; the message names them."""


class File:
    """One file that is read by byte ranges; `local` is its path on this machine. Two are equal if their URIs are."""

    local: Path | None = None

    def __init__(self, fs: Any, path: str, uri: str, folder: Place) -> None:
        self.fs, self.path, self.uri, self.folder = fs, path, uri, folder
        self.name = posixpath.basename(path)

    def __repr__(self) -> str:
        return str(self.local or self.uri)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, File) and self.uri == other.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    @property
    def size(self) -> int:
        """Its length in bytes."""
        with self.input() as file:
            return int(file.size())

    def exists(self) -> bool:
        """Whether it is there."""
        return bool(self.fs.get_file_info(self.path).type == pafs.FileType.File)

    def input(self) -> Any:
        """Open it as Arrow's random access file."""
        return self.fs.open_input_file(self.path)

    def open(self) -> Bytes:
        """Open it for reading segments."""
        return Bytes(self.input())

    def read(self) -> bytes:
        """All of it."""
        with self.input() as file:
            return bytes(file.read())

    def fetch(self, to: Path) -> None:
        """Copy it to a local file."""
        with self.fs.open_input_stream(self.path) as data, to.open("wb") as out:
            shutil.copyfileobj(data, out, _PIECE)

    def write(self, data: bytes | pa.Buffer) -> None:
        """Create or replace it; in a bucket it is durable when this returns."""
        with self.fs.open_output_stream(self.path) as file:
            file.write(data)

    def remove(self) -> None:
        """Remove it, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.delete_file(self.path)


class Place:
    """A directory of a `pyarrow.fs` file system; `path` has no slash at its end, `uri` no settings.

    `id` distinguishes its store from others, also on another server. `restores`: its files are fetched to the disk,
    where there is room, before much of them is read.
    """

    local: Path | None = None

    def __init__(self, fs: Any, path: str, uri: str, id: str = "", restores: bool = True) -> None:
        self.fs, self.path, self.uri, self.id, self.restores = fs, path, uri, id, restores

    def __repr__(self) -> str:
        return str(self.local or self.uri)

    def below(self, name: str) -> Place:
        """A directory below this one."""
        return Place(self.fs, posixpath.join(self.path, name), f"{self.uri}/{quote(name)}", self.id, self.restores)

    def file(self, name: str) -> File:
        """A file below the directory, by its relative path."""
        at = self.below(name)
        return File(self.fs, at.path, at.uri, at.above)

    @property
    def above(self) -> Place:
        """The directory that it is in."""
        above = posixpath.dirname(self.path)
        return Place(self.fs, above, self.uri.rpartition("/")[0], self.id, self.restores)

    @property
    def name(self) -> str:
        """Its name within that."""
        return posixpath.basename(self.path)

    def infos(self, deep: bool = False) -> list[Any]:
        """The `pyarrow.fs.FileInfo` of its files, with `deep` also of those in subdirectories."""
        selector = pafs.FileSelector(self.path, allow_not_found=True, recursive=deep)
        return [info for info in self.fs.get_file_info(selector) if info.type == pafs.FileType.File]


class Bytes:
    """A file open for reading, which had `size` bytes then. Small reads are served from cached blocks."""

    def __init__(self, file: Any) -> None:
        self.size = int(file.size())
        self._file = file
        self._blocks: dict[int, bytes] = {}  # in the order in which they were fetched

    def read(self, at: int, count: int) -> bytes:
        """A copy of `count` bytes from offset `at`; fewer at the end of the file."""
        count = max(0, min(count, self.size - at))
        if count >= _BLOCK:
            return bytes(self._file.read_at(count, at))
        first, last = at // _BLOCK, max(at, at + count - 1) // _BLOCK
        data = b"".join(map(self._block, range(first, last + 1)))
        return data[at - first * _BLOCK :][:count]

    def mapped(self, at: int, count: int) -> memoryview | None:
        """The same without a copy, to be passed to `check` before it is read; None where the file is not mapped."""
        return None

    def check(self, end: int) -> None:
        """Raise DamagedError if a mapped file is now shorter than `end` bytes, FileNotFoundError if it is gone."""

    def close(self) -> None:
        """Close the file; what is mapped stays valid, and a file that is not mapped can still be read."""
        # The first block has the schema, which is needed to read any batch later.
        self._blocks = {number: block for number, block in self._blocks.items() if not number}

    def _block(self, number: int) -> bytes:
        block = self._blocks.get(number)
        if block is None:
            while len(self._blocks) >= _BLOCKS:
                self._blocks.pop(next(iter(self._blocks)), None)
            begin = number * _BLOCK
            block = bytes(self._file.read_at(max(0, min(_BLOCK, self.size - begin)), begin))
            self._blocks[number] = block
        return block


class DiskFile(File):
    """A local file, which is mapped."""

    def __init__(self, path: Path) -> None:
        super().__init__(_DISK, str(path), path.absolute().as_uri(), Directory(path.parent))
        self.local: Path = path

    def open(self) -> Bytes:
        """Map it."""
        return _Mapped(self.local)


class Directory(Place):
    """A local directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(_DISK, str(path), path.absolute().as_uri(), restores=False)
        self.local: Path = path


class _Mapped(Bytes):
    """A mapped file. The map is private and copies on write, so that tensors over it may be written to.

    Touching a page that the file no longer has would kill the process: small reads, and so everything that is read
    before a run is known to be whole, do not use the map, and what is mapped is checked before it is touched.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self.size = os.fstat(self._file.fileno()).st_size
        self._map = memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else b"")

    def read(self, at: int, count: int) -> bytes:
        return os.pread(self._file.fileno(), count, at)

    def mapped(self, at: int, count: int) -> memoryview:
        return self._map[at : at + count]

    def check(self, end: int) -> None:
        if (size := self._path.stat().st_size) < end:
            raise DamagedError(f"{self._path}: it is cut short: it has {size} bytes, and what is read ends at {end}")

    def close(self) -> None:
        self._file.close()


Source = File | Place
"""One file, or the directory of a store or a session."""


def place_of(uri: str) -> Place:
    """The directory that a URI names, opened with the settings in its query.

    `s3://bucket/prefix?region=...&endpoint_override=host:port&scheme=http`; all other schemes are those of
    `pyarrow.fs`. ValueError if no file system has such URIs, or it may contain a key.
    """
    public = public_uri(check_uri(uri))
    if urlsplit(uri).scheme == "s3":
        try:
            fs, path = _s3(uri)
        except (pa.ArrowException, TypeError) as error:
            raise ValueError(f"{public} cannot be a store: {error}") from None
    else:
        try:
            fs, path = pafs.FileSystem.from_uri(uri)
        except pa.ArrowException as error:
            raise ValueError(f"{public} cannot be a store: {error}; S3's are s3://bucket/prefix") from None
    return Place(fs, path.rstrip("/"), public, store_id(uri))


def _s3(uri: str) -> tuple[Any, str]:
    url = urlsplit(uri)
    settings = {name: {"true": True, "false": False}.get(value, value) for name, value in parse_qsl(url.query)}
    fs = pafs.S3FileSystem(
        **settings,
        background_writes=False,  # memory stays bounded: a writer waits for the network
        allow_delayed_open=True,  # a small object is one request
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    )
    return fs, f"{url.hostname}{unquote(url.path)}"


def path_of(uri: str) -> Path:
    """The path of a `file:` URI of this machine."""
    return Path(unquote(urlsplit(uri).path))


def file_at(uri: str, places: Sequence[Place] = ()) -> File:
    """A store's file by its URI in a catalogue: below one of `places`, else on a local disk."""
    for place in places:
        if uri.startswith(f"{place.uri}/"):
            return place.file(unquote(uri.removeprefix(f"{place.uri}/")))
    return DiskFile(path_of(uri))


def source_of(source: str | os.PathLike[str] | Source) -> Source:
    """The file or directory that a path or URI names; ValueError if it is on another machine or of no file system."""
    if isinstance(source, (File, Place)):
        return source
    text = os.fspath(source)
    if "://" not in text:
        path = Path(text).expanduser()
    elif (url := urlsplit(text)).scheme != "file":
        place = place_of(text)
        is_file = place.path.endswith(".arrow")
        return File(place.fs, place.path, place.uri, place.above) if is_file else place
    elif url.netloc not in ("", "localhost"):
        raise ValueError(f"{text!r} is not a file:// URI of this machine")
    else:
        path = path_of(text)
    return DiskFile(path) if path.is_file() else Directory(path)
