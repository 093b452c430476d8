"""A bucket's manifest: its segments with their runs, its deletions, and copies of pins and owners.

`<bucket>/.manifest/` has *parts*, JSON lines written by one server each, and *snapshots*, a catalogue's database
compressed with Zstandard, which replace older parts. A segment's name is never used again, and a deletion names its
segments. So parts and snapshots may be applied in any order and any number of times.

Every function raises OSError on an error of the bucket or the disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from deployments.activations.files.places import File, Place

FOLDER = ".manifest"  # no session id begins with '.'
Line = Mapping[str, Any]
_PART, _SNAPSHOT, _SNAPSHOT_END = ".jsonl", "snapshot-", ".sqlite.zst"
_AT_ONCE = 16  # objects that are fetched or removed at a time
_PIECE = 4 << 20
_PART_BYTES = 16 << 20  # that are sent or fetched at once


class Manifest:
    """The manifest of one bucket; `bucket` begins segments' URIs there, `disk` in the store's directory, if any.

    Args:
        place: The bucket.
        writer: This server's name, part of the names of the parts that it writes.
        root: The store's directory, if this server has one.
    """

    def __init__(self, place: Place, writer: str = "reader", root: Path | None = None) -> None:
        self.place = place
        self.bucket, self.disk = f"{place.uri}/", f"{root.as_uri()}/" if root else ""
        self._folder = place.below(FOLDER)
        self._writer = writer
        self._last = 0

    def names(self) -> dict[str, int]:
        """The bytes of each part and snapshot by its name; empty where the bucket has no manifest."""
        sizes = {info.base_name: info.size for info in self._folder.infos()}
        return {name: size for name, size in sizes.items() if name.endswith(_PART) or is_snapshot(name)}

    def write(self, lines: Iterable[Line]) -> str:
        """Add a part, durable when this returns, and return its name."""
        return self._add("", _PART, io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode()))

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, list[Line]]]:
        """Parts, each with its lines; ValueError names one that is damaged."""

        def read_one(name: str) -> tuple[str, list[Line]]:
            try:
                return name, [json.loads(line) for line in self._folder.file(name).read().splitlines()]
            except ValueError as error:
                raise ValueError(f"{self._folder}/{name} is damaged, and runs may be missing: {error}") from error

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for first in range(0, len(names), _AT_ONCE):  # others are not read ahead into memory
                yield from pool.map(read_one, names[first : first + _AT_ONCE])

    def fetch(self, snapshot: str, to: Path) -> None:
        """Write a snapshot's database to a file; OSError if the snapshot is damaged."""
        file = self._folder.file(snapshot)
        packed = file.fs.open_input_stream(file.path, compression=None, buffer_size=_PART_BYTES)
        with pa.CompressedInputStream(packed, "zstd") as data, to.open("wb") as out:
            shutil.copyfileobj(data, out, _PIECE)

    def put_snapshot(self, database: Path) -> str:
        """Compress a database and put it into the bucket as a snapshot, durable when this returns; return its name."""
        packed = database.with_suffix(".zst")
        with database.open("rb") as data, pa.CompressedOutputStream(str(packed), "zstd") as squeezed:
            shutil.copyfileobj(data, squeezed, _PIECE)
        with packed.open("rb") as data:
            return self._add(_SNAPSHOT, _SNAPSHOT_END, data)

    def remove(self, names: Collection[str]) -> None:
        """Remove parts and snapshots."""
        remove_all([self._folder.file(name) for name in names])

    def _add(self, beginning: str, end: str, data: BinaryIO) -> str:
        self._last = max(self._last + 1, time.time_ns())
        file = self._folder.file(f"{beginning}{self._last:020}-{self._writer}{end}")
        try:
            upload(data, file)
        except OSError:
            with contextlib.suppress(OSError):  # half of it may be there, or all, and it would count later
                file.remove()
            raise
        return file.name


def is_snapshot(name: str) -> bool:
    """Whether an object of the manifest is a snapshot, and no part."""
    return name.startswith(_SNAPSHOT) and name.endswith(_SNAPSHOT_END)


def upload(data: BinaryIO, file: File) -> None:
    """Copy data into the bucket; OSError if the object is then not as long."""
    with file.fs.open_output_stream(file.path, compression=None, buffer_size=_PART_BYTES) as out:
        shutil.copyfileobj(data, out, _PIECE)
    if (found := file.fs.get_file_info(file.path).size) != (size := data.tell()):
        raise OSError(f"{file} has {found} bytes of the {size} that were written")


def remove_all(files: Sequence[File]) -> None:
    """Remove objects; those that are not there are no error."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(File.remove, files))
