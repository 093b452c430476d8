"""Where files of stored runs lie, and how they are read there: by ranges of bytes, or mapped from this machine's disk.

A `Place` is a directory, a `File` a file of any file system of pyarrow's: of a bucket, or of what answers for ranges.
`Directory` and `DiskFile` are those of this machine.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import posixpath
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from deployments.activations.catalogue.database import NAME
from deployments.activations.catalogue.scan import files_of, scan
from deployments.activations.facts import check_session_id, public_uri, store_id
from deployments.options import check_uri

ATTEMPTS = 5  # of each request to S3, with growing pauses
_BLOCK = 32 << 10  # bytes; reads of more are requests of their own
_BLOCKS = 64  # of one file that are kept
_DISK = pafs.LocalFileSystem()


class DamagedError(ValueError):
    """Stored values that are not those that were written; the message says which."""


class Located(NamedTuple):
    """A run's file, and the byte of it where the run begins."""

    run_id: str
    file: File
    offset: int


class File:
    """One file of a file system of pyarrow's, of which ranges are read: an object of a bucket, for one.

    Args:
        fs: Its file system.
        path: Its name there.
        uri: What others name it by, without settings.
        folder: The directory that it is in.

    Attributes:
        name: Its name within its directory.
        local: Its path on this machine; None where it is elsewhere.
    """

    local: Path | None = None

    def __init__(self, fs: Any, path: str, uri: str, folder: Place) -> None:
        self.fs = fs
        self.path = path
        self.uri = uri
        self.name = posixpath.basename(path)
        self.folder = folder

    def __repr__(self) -> str:
        return self.uri

    def __eq__(self, other: object) -> bool:
        return isinstance(other, File) and self.uri == other.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    @property
    def size(self) -> int:
        """Bytes.

        Raises:
            FileNotFoundError: It is not there.
        """
        with self.input() as file:
            return int(file.size())

    def exists(self) -> bool:
        """Whether it is there.

        Raises:
            OSError: The store refuses.
        """
        return bool(self.fs.get_file_info(self.path).type == pafs.FileType.File)

    def input(self) -> Any:
        """Arrow's random access file of it.

        Raises:
            OSError: It is not there, or the store refuses.
        """
        return self.fs.open_input_file(self.path)

    def open(self) -> Bytes:
        """The same, as whoever reads segments needs it."""
        return Bytes(self.input())

    def read(self) -> bytes:
        """All of it.

        Raises:
            OSError: It is not there, or the store refuses.
        """
        with self.input() as file:
            return bytes(file.read())

    def write(self, data: bytes | pa.Buffer) -> None:
        """Put it there, or another in its place; in a bucket it is durable when this returns.

        Raises:
            OSError: The store refuses.
        """
        with self.fs.open_output_stream(self.path) as file:
            file.write(data)

    def remove(self) -> None:
        """Remove it; one that is not there is no error.

        Raises:
            OSError: The store refuses.
        """
        with contextlib.suppress(FileNotFoundError):
            self.fs.delete_file(self.path)

    def present(self) -> File | Place:
        """It, or where it is gone its directory: earlier versions joined small objects to larger ones."""
        return self if self.exists() else self.folder

    def segments(self, session: str | None = None) -> list[File]:
        """It alone."""
        return [self]

    def find(self, runs: Collection[str]) -> list[Located]:
        """No file says where runs are but by being looked through."""
        return []


class Place:
    """A directory of a file system of pyarrow's: a bucket, for one.

    Args:
        fs: The file system.
        path: The directory's name there, without a slash at its end.
        uri: The same as a URI, without settings: what files below it are named by to others.
        id: What tells the store that it is in, or is, from others, also of the same URI at another server.
        restores: Whether files are fetched to the disk as a whole, where there is room, before much of them is read.
    """

    def __init__(self, fs: Any, path: str, uri: str, id: str = "", restores: bool = True) -> None:
        self.fs = fs
        self.path = path
        self.uri = uri
        self.id = id
        self.restores = restores

    def __repr__(self) -> str:
        return self.uri

    def below(self, name: str) -> Place:
        """A directory below this one."""
        return Place(self.fs, posixpath.join(self.path, name), f"{self.uri}/{quote(name)}", self.id, self.restores)

    def file(self, name: str) -> File:
        """A file below the directory, by its name relative to it."""
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
        """What `pyarrow.fs` says of the files in the directory; nothing where it is not there.

        Args:
            deep: Also of those in directories below it.

        Raises:
            OSError: The store refuses.
        """
        selector = pafs.FileSelector(self.path, allow_not_found=True, recursive=deep)
        return [info for info in self.fs.get_file_info(selector) if info.type == pafs.FileType.File]

    def present(self) -> File | Place:
        """It."""
        return self

    def segments(self, session: str | None = None) -> list[File]:
        """Its Arrow files by their names.

        Args:
            session: Of a store, those of this session alone.

        Raises:
            FileNotFoundError: There is no such directory or session.
            ValueError: `session` can name none.
            OSError: It cannot be listed.
        """
        from deployments.activations.archive.manifest import segments_in  # which stands on this module

        found = segments_in(self if session is None else self.below(check_session_id(session)))
        if not found:
            raise FileNotFoundError(f"there is nothing at {self}" + (f" of session {session!r}" if session else ""))
        return found

    def find(self, runs: Collection[str]) -> list[Located]:
        """Those of the runs of which a catalogue or manifest says where they are; no file is looked at.

        Raises:
            OSError: The manifest cannot be read.
        """
        from deployments.activations.archive.manifest import find_runs

        return [Located(*found) for found in find_runs(self, runs)]


class Bytes:
    """A file that is open for reading. What is small comes out of blocks, each of which is fetched once.

    Attributes:
        size: Its bytes when it was opened.
    """

    def __init__(self, file: Any) -> None:
        """Arrow's random access file of it."""
        self.size = int(file.size())
        self._file = file
        self._blocks: dict[int, bytes] = {}  # the one that was fetched first at the front

    def read(self, at: int, count: int) -> bytes:
        """A copy of bytes of it; fewer where it ends.

        Raises:
            OSError: They cannot be read.
        """
        count = max(0, min(count, self.size - at))
        if count >= _BLOCK:
            return bytes(self._file.read_at(count, at))
        first, last = at // _BLOCK, max(at, at + count - 1) // _BLOCK
        data = b"".join(map(self._block, range(first, last + 1)))
        return data[at - first * _BLOCK :][:count]

    def mapped(self, at: int, count: int) -> memoryview | None:
        """The same without a copy, to be checked before it is touched; None where nothing is mapped."""
        return None

    def check(self, end: int) -> None:
        """Refuse to touch what is mapped of a file that was cut short since it was opened.

        Args:
            end: The least bytes that it must have.

        Raises:
            DamagedError: It has less.
            FileNotFoundError: It is gone.
        """

    def close(self) -> None:
        """Let go of what is open or kept; what is mapped stays, and where nothing is, it is still read."""
        # The first block, which has the schema, is of use to whoever reads a batch later.
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


# ---- this machine


class DiskFile(File):
    """A file of a disk of this machine, which is mapped.

    Args:
        path: Its path.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(_DISK, str(path), path.absolute().as_uri(), Directory(path.parent))
        self.local: Path = path

    def __repr__(self) -> str:
        return self.path

    def open(self) -> Bytes:
        """As of any file."""
        return _Mapped(self.local)

    def present(self) -> File:
        """It."""
        return self


class Directory(Place):
    """A store's or session's directory on this machine.

    Args:
        path: Its path.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(_DISK, str(path), path.absolute().as_uri(), restores=False)
        self.local = path

    def __repr__(self) -> str:
        return self.path

    def segments(self, session: str | None = None) -> list[File]:
        """As of any place; links are not followed."""
        if not self.local.is_dir():
            raise FileNotFoundError(f"there is nothing at {self}")
        found = list(files_of(self.local))
        if not found and session is None:
            found = list(scan(self.local))
        elif not found:
            folder = self.local / check_session_id(session or "")
            if not folder.is_dir() or folder.is_symlink():
                raise FileNotFoundError(f"there is no session {session!r} in {self}")
            found = list(files_of(folder))
        return [DiskFile(seen.file) for seen in found]

    def find(self, runs: Collection[str]) -> list[Located]:
        """What the catalogue's database says, where there is one."""
        from deployments.activations.catalogue.shared import known  # which stands on this module

        if not (self.local / NAME).is_file():
            return []
        found = known(self.local.resolve(), runs)
        return [Located(entry.facts.run_id, file_at(entry.uri), entry.offset) for entry in found]


class _Mapped(Bytes):
    """A file that is mapped. The map is private and copies on write, so that writing to a tensor over it is allowed.

    Touching a page that the file no longer has would end the process: small reads, and so all that is read before a run
    is known to be whole, do without the map, and what is mapped is checked before it is touched.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self.size = os.fstat(self._file.fileno()).st_size
        empty = memoryview(b"")
        self._map = memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)) if self.size else empty

    def read(self, at: int, count: int) -> bytes:
        return os.pread(self._file.fileno(), count, at)

    def mapped(self, at: int, count: int) -> memoryview:
        return self._map[at : at + count]

    def check(self, end: int) -> None:
        if (size := self._path.stat().st_size) < end:
            raise DamagedError(f"{self._path}: it is cut short: it has {size} bytes, and what is read ends at {end}")

    def close(self) -> None:
        self._file.close()


# ---- what URIs and paths mean

Source = File | Place
"""One file, or a directory of a store or a session, of which runs are read."""


def place_of(uri: str) -> Place:
    """The place that a URI means, with the settings that stand in it.

    `s3://bucket/prefix?region=...&endpoint_override=host:port&scheme=http`; keys come from where AWS's own tools
    find them. All others are `pyarrow.fs`'s.

    Raises:
        ValueError: It is no URI of a file system, or may hold a key.
    """
    public = public_uri(check_uri(uri))
    if urlsplit(uri).scheme == "s3":
        try:
            fs, path = _s3(uri)
        except (pa.ArrowException, TypeError) as error:
            raise ValueError(f"{public} is no place for a store: {error}") from None
    else:
        try:
            fs, path = pafs.FileSystem.from_uri(uri)
        except pa.ArrowException as error:
            raise ValueError(f"{public} is no place for a store: {error}; S3's are s3://bucket/prefix") from None
    return Place(fs, path.rstrip("/"), public, store_id(uri))


def _s3(uri: str) -> tuple[Any, str]:
    url = urlsplit(uri)
    settings = {name: {"true": True, "false": False}.get(value, value) for name, value in parse_qsl(url.query)}
    fs = pafs.S3FileSystem(
        **settings,
        background_writes=False,  # memory stays bounded, and who writes waits for the network
        allow_delayed_open=True,  # a small object is one request
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    )
    return fs, f"{url.hostname}{unquote(url.path)}"


def file_at(uri: str, places: Sequence[Place] = ()) -> File:
    """A store's file, by the URI that a catalogue names it by, which says neither keys nor settings.

    Args:
        uri: The file's: below one of the places, else of a disk of this machine.
        places: Where else files of the store are.
    """
    for place in places:
        if uri.startswith(f"{place.uri}/"):
            return place.file(unquote(uri.removeprefix(f"{place.uri}/")))
    return DiskFile(Path(unquote(urlsplit(uri).path)))


def source_of(source: str | os.PathLike[str] | Source) -> Source:
    """The file or directory that a path or URI means; what is one already as it is.

    A URI of object storage is a file's if it ends in `.arrow`.

    Raises:
        ValueError: It is a `file://` URI of another machine, or no URI of a file system.
    """
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
        path = Path(unquote(url.path))
    return DiskFile(path) if path.is_file() else Directory(path)
