"""Files in buckets: what a path is for a file of a disk, of which no more is fetched than is asked for."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from deployments.activations.facts import public_uri, store_id
from deployments.options import check_uri

ATTEMPTS = 5  # of each request to S3, with growing pauses
_BLOCK = 32 << 10  # bytes; reads of more are requests of their own
_BLOCKS = 64  # of one file that are kept


class Place(NamedTuple):
    """A directory of a file system.

    Attributes:
        fs: The file system.
        path: The directory's name there, without a slash at its end.
        uri: The same as a URI, without settings: what files below it are named by to others.
        id: What tells the store that it is in, or is, from others, also of the same URI at another server.
    """

    fs: Any
    path: str
    uri: str
    id: str

    def __repr__(self) -> str:
        return self.uri

    def below(self, name: str) -> Place:
        """A directory below this one."""
        return Place(self.fs, posixpath.join(self.path, name), f"{self.uri}/{quote(name)}", self.id)

    def file(self, name: str) -> ObjectFile:
        """A file below the directory, by its name relative to it."""
        return ObjectFile(*self.below(name))

    @property
    def above(self) -> Place:
        """The directory that it is in."""
        return Place(self.fs, posixpath.dirname(self.path), self.uri.rpartition("/")[0], self.id)

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


class ObjectFile:
    """One file in a bucket.

    Args:
        fs: Its file system.
        path: Its name there.
        uri: What others name it by.
        store: The id of the store that it is in, as `Place` says it.
    """

    def __init__(self, fs: Any, path: str, uri: str, store: str) -> None:
        self.fs = fs
        self.path = path
        self.uri = uri
        self._store = store
        self._readers: dict[tuple[int, ...], Any] = {}
        self._opened: _Opened | None = None

    def __repr__(self) -> str:
        return self.uri

    def read(self) -> bytes:
        """All of it.

        Raises:
            OSError: It is not there, or the store refuses.
        """
        with self.fs.open_input_file(self.path) as file:
            return bytes(file.read())

    def write(self, data: bytes | pa.Buffer) -> None:
        """Put it there, or another in its place; durable when this returns.

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

    @property
    def folder(self) -> Place:
        """The directory that it is in."""
        return Place(self.fs, self.path, self.uri, self._store).above

    @property
    def name(self) -> str:
        """Its name within its directory."""
        return posixpath.basename(self.path)

    def as_uri(self) -> str:
        """What others name it by."""
        return self.uri

    def exists(self) -> bool:
        """Whether it is there.

        Raises:
            OSError: The store refuses.
        """
        return bool(self.fs.get_file_info(self.path).type == pafs.FileType.File)

    @cached_property
    def size(self) -> int:
        """Bytes.

        Raises:
            FileNotFoundError: It is not there.
        """
        return self._open().size

    def reader(self, columns: Sequence[int] = ()) -> Any:
        """Arrow's reader of these columns, or of all; one for each choice of them.

        Raises:
            pa.ArrowInvalid: It is no Arrow file.
            OSError: It is not there, or the store refuses.
        """
        key = tuple(columns)
        if key not in self._readers:
            options = pa.ipc.IpcReadOptions(included_fields=list(columns)) if columns else None
            self._readers[key] = pa.ipc.open_file(_View(self._open()), options=options)
        return self._readers[key]

    def _open(self) -> _Opened:
        self._opened = self._opened or _Opened(self.fs.open_input_file(self.path))
        return self._opened

    def close(self) -> None:
        """Let go of what readers of it hold in memory; whoever reads on opens it again."""
        self._readers.clear()
        self._opened = None

    def batches(self, first: int = 0) -> Iterator[tuple[FetchedBatch, Mapping[bytes, bytes] | None]]:
        """Its batches from number `first` on, each with its own metadata; no tensor is fetched.

        Closes the file at the end of them.

        Raises:
            pa.ArrowInvalid: It is no Arrow file.
            OSError: It is not there, or the store refuses.
        """
        schema = self.reader().schema
        light = self.reader([schema.get_field_index("position")])
        for number in range(first, light.num_record_batches):
            batch, metadata = light.get_batch_with_custom_metadata(number)
            yield FetchedBatch(self, number, schema, batch.num_rows), metadata
        self.close()  # who lists a store's files may hold all of them


class _Opened:
    """A file of a bucket, opened once: what is small comes out of blocks, each of which is fetched once."""

    def __init__(self, file: Any) -> None:
        self.size = int(file.size())
        self._file = file
        self._blocks: dict[int, bytes] = {}  # the one that was fetched first at the front

    def read_at(self, at: int, count: int) -> bytes:
        if count >= _BLOCK:
            return bytes(self._file.read_at(count, at))
        first, last = at // _BLOCK, max(at, at + count - 1) // _BLOCK
        data = b"".join(map(self._block, range(first, last + 1)))
        return data[at - first * _BLOCK :][:count]

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            while len(self._blocks) >= _BLOCKS:
                self._blocks.pop(next(iter(self._blocks)), None)
            begin = number * _BLOCK
            self._blocks[number] = bytes(self._file.read_at(min(_BLOCK, max(0, self.size - begin)), begin))
        return self._blocks[number]


class _View(io.RawIOBase):
    """What Arrow reads an opened file by."""

    def __init__(self, opened: _Opened) -> None:
        self._opened = opened
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._opened.size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._opened.size - self._at)
        data = self._opened.read_at(self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data


class FetchedBatch:
    """A record batch of which each column is fetched when it is asked for.

    Attributes:
        schema: Of all its columns.
        num_rows: Its rows.
    """

    def __init__(self, file: ObjectFile, number: int, schema: pa.Schema, rows: int) -> None:
        self.schema = schema
        self.num_rows = rows
        self._file = file
        self._number = number

    def select(self, names: Sequence[str]) -> pa.RecordBatch:
        """These columns, in this order.

        Raises:
            pa.ArrowInvalid: Their values lie outside of the batch.
        """
        places = sorted(self.schema.get_field_index(name) for name in names)
        batch = self._file.reader(places).get_batch(self._number)
        batch.validate(full=True)  # Arrow trusts what the file says, and would end the process
        return batch.select(list(names))

    def __getitem__(self, name: str) -> pa.Array:
        return self.select([name])[name]


AnyFile = Path | ObjectFile
"""A segment, on a disk or in a bucket."""

AnyRoot = Path | Place
"""Where segments lie: a store's directory, or a bucket."""
