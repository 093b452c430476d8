"""A bucket's manifest: which segments it holds, the runs in them, what was deleted, and copies of pins and owners.

`<bucket>/.manifest/` has *parts*, JSON lines that one writer adds, and *snapshots*, a catalogue's database compressed
by Zstandard, each of which stands for parts and snapshots that are removed then. Segments are added once under names
that never come again, and a deletion names its segments for good. So parts and snapshots mean the same in any order and
any number of times: a crash between two requests, or two writers by mistake, lose nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from deployments.activations.archive import earlier as old_buckets
from deployments.activations.catalogue.database import LAYOUT, connected, lay_out, transaction
from deployments.activations.catalogue.entries import SUM_AGAIN, Entry, add_runs, facts_of
from deployments.activations.files.places import File, Place
from deployments.options import home

FOLDER = ".manifest"  # no session id begins with '.'
Line = Mapping[str, Any]
_PART, _SNAPSHOT, _SNAPSHOT_END = ".jsonl", "snapshot-", ".sqlite.zst"
_AT_ONCE = 16  # objects that are fetched or removed beside each other
_PIECE = 4 << 20
_PART_BYTES = 16 << 20  # that are sent or fetched at once
_PLACE = ("bytes", "rows", "first_row", "offset", "batch")  # what a line says of a run beside its facts
_UNRESTORED = "pins and owners"  # beside the names of parts, until `restored`
_RUN = "run_id, created, model, sample_id, tags, tokens, bytes, rows, first_row, offset, batch, facts"

logger = logging.getLogger(__name__)


class Bases:
    """What stands before a segment's name in URIs.

    Args:
        bucket: In the bucket's.
        disk: In those of files of the store's directory.
    """

    def __init__(self, bucket: str, disk: str = "") -> None:
        self.bucket = bucket and f"{bucket}/"
        self.disk = disk and f"{disk}/"


class Manifest:
    """The manifest of one bucket.

    Args:
        place: The bucket, or a directory in it.
        writer: What tells this server's parts from those of others.
        root: The store's directory, where the segments are read from there as well.

    Attributes:
        place: As given.
        bases: What stands before segments' names in URIs.
    """

    def __init__(self, place: Place, writer: str = "reader", root: Path | None = None) -> None:
        self.place = place
        self.bases = Bases(place.uri, root.as_uri() if root else "")
        self._folder = place.below(FOLDER)
        self._writer = writer
        self._last = 0

    def names(self) -> dict[str, int]:
        """The bytes of each part and snapshot by its name; empty where the bucket has no manifest.

        Raises:
            OSError: The bucket cannot be listed.
        """
        return {
            info.base_name: info.size
            for info in self._folder.infos()
            if info.base_name.endswith(_PART) or is_snapshot(info.base_name)
        }

    def write(self, lines: Iterable[Line]) -> str:
        """Add a part; durable when this returns.

        Returns:
            The part's name.

        Raises:
            OSError: The bucket refuses.
        """
        name = f"{self._number():020}-{self._writer}{_PART}"
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = self._folder.file(name)
        try:
            put_whole(file, data)
        except OSError:
            with contextlib.suppress(OSError):  # perhaps only the answer was lost, and it would count later
                file.remove()
            raise
        return name

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, list[Line]]]:
        """Parts, each with its lines.

        Raises:
            OSError: The bucket refuses.
            ValueError: One is damaged; the message names it.
        """

        def read_one(name: str) -> tuple[str, list[Line]]:
            try:
                return name, [json.loads(line) for line in self._folder.file(name).read().splitlines()]
            except ValueError as error:
                raise ValueError(f"{self._folder}/{name} is damaged, and runs may be missing: {error}") from error

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            yield from pool.map(read_one, names)

    def fetch(self, snapshot: str, to: Path) -> None:
        """Write a snapshot's database to a file.

        Raises:
            OSError: The bucket or the disk refuses, or the snapshot is damaged.
        """
        file = self._folder.file(snapshot)
        packed = file.fs.open_input_stream(file.path, compression=None, buffer_size=_PART_BYTES)
        with pa.CompressedInputStream(packed, "zstd") as data, to.open("wb") as out:
            while piece := data.read(_PIECE):
                out.write(piece)

    def put_snapshot(self, database: Path) -> str:
        """Compress a database and put it into the bucket as a snapshot; durable when this returns.

        Returns:
            The snapshot's name.

        Raises:
            OSError: The bucket or the disk refuses.
        """
        name = f"{_SNAPSHOT}{self._number():020}-{self._writer}{_SNAPSHOT_END}"
        file = self._folder.file(name)
        packed = database.with_suffix(".zst")
        with database.open("rb") as data, pa.CompressedOutputStream(str(packed), "zstd") as squeezed:
            while piece := data.read(_PIECE):
                squeezed.write(piece)
        try:
            upload(packed, file)
        except OSError:
            file.remove()  # half of it may be there, under a name that is read
            raise
        return name

    def remove(self, names: Collection[str]) -> None:
        """Remove parts and snapshots.

        Raises:
            OSError: The bucket refuses.
        """
        remove_all([self._folder.file(name) for name in names])

    def _number(self) -> int:
        self._last = max(self._last + 1, time.time_ns())
        return self._last


def is_snapshot(name: str) -> bool:
    """Whether an object of the manifest is a snapshot, and no part."""
    return name.startswith(_SNAPSHOT) and name.endswith(_SNAPSHOT_END)


def put_whole(file: File, data: bytes) -> None:
    """Write a small object, and see that all of it is there.

    Raises:
        OSError: The bucket refuses.
    """
    file.write(data)
    _check_size(file, len(data))


def upload(path: Path, file: File) -> None:
    """Copy a file into the bucket, in parts that are sent several times where that is needed.

    Raises:
        OSError: The disk or the bucket refuses, or the object is not as long as the file.
    """
    size = path.stat().st_size
    with (
        path.open("rb") as data,
        file.fs.open_output_stream(file.path, compression=None, buffer_size=_PART_BYTES) as out,
    ):
        shutil.copyfileobj(data, out, _PIECE)
    _check_size(file, size)


def _check_size(file: File, size: int) -> None:
    found = file.fs.get_file_info(file.path).size
    if found != size:
        raise OSError(f"{file} has {found} bytes of the {size} that were written")


def remove_all(files: Sequence[File]) -> None:
    """Remove objects; those that are not there are no error.

    Raises:
        OSError: The bucket refuses.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(File.remove, files))


# ---- what lines mean


def deletion(session_id: str, segments: Iterable[str], *, done: bool = False) -> Line:
    """The line that says that a session's segments are deleted; `done` once their objects are removed as well."""
    return {"deleted": session_id, "segments": sorted(segments), "done": done, "at": time.time()}


def record(kind: str, session_id: str, value: Any) -> Line:
    """The line that copies a pin (`value` true) or an owner's record; None where there is none any more."""
    return {"record": kind, "session": session_id, "value": value, "at": time.time()}


def segment_line(database: sqlite3.Connection, uri: str) -> Line:
    """The line that says that a file of the catalogue is in the bucket."""
    known = "SELECT id, bytes, rows, points FROM files WHERE uri = ?"
    id, size, rows, points = database.execute(known, (uri,)).fetchone()
    found = database.execute("SELECT bytes, rows, first_row, offset, batch, facts FROM runs WHERE file = ?", (id,))
    runs = [dict(zip(_PLACE, row[:5], strict=True)) | {"facts": json.loads(row[5])} for row in found]
    return {"segment": name_of(uri), "bytes": size, "rows": rows, "points": json.loads(points), "runs": runs}


def name_of(uri: str) -> str:
    """A segment's name in manifests, `<session>/<file>`, by its URI on a disk or in a bucket."""
    return "/".join(uri.rsplit("/", 2)[-2:])


def replay(database: sqlite3.Connection, part: str | None, lines: Iterable[Line], bases: Bases) -> None:
    """Bring what lines say into a catalogue's database: all or nothing."""
    with transaction(database):
        for line in lines:
            if "segment" in line:
                _add(database, line, bases)
            elif "deleted" in line:
                _delete(database, line, bases)
            elif "record" in line:
                value = None if line["value"] is None else json.dumps(line["value"])
                database.execute(_KEEP, (line["record"], line["session"], value, line["at"]))
        if part is not None:
            database.execute("INSERT OR IGNORE INTO applied VALUES (?)", (part,))


_KEEP = """INSERT INTO records VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value, at = excluded.at
    WHERE excluded.at > at"""


def _add(database: sqlite3.Connection, line: Line, bases: Bases) -> None:
    name = line["segment"]
    if database.execute("SELECT 1 FROM deleted WHERE segment = ?", (name,)).fetchone():
        return
    session_id = name.partition("/")[0]
    of_disk = """UPDATE files SET archived = 1 WHERE session = ? AND bytes = ?
        AND (uri = ? OR uri LIKE 'node://%' AND substr(uri, -length(?)) = ?)"""
    if database.execute(of_disk, (session_id, line["bytes"], bases.disk + name, f"/{name}", f"/{name}")).rowcount:
        return
    new = """INSERT OR IGNORE INTO files (session, uri, bytes, sealed, rows, modified_ns, points, archived)
        VALUES (?, ?, ?, 1, ?, 0, ?, 1)"""
    values = (session_id, bases.bucket + name, line["bytes"], line["rows"], json.dumps(line["points"]))
    added = database.execute(new, values)
    if added.rowcount:
        entries = [
            Entry(facts_of(run["facts"]), "", points={}, **{name: run[name] for name in _PLACE}) for run in line["runs"]
        ]
        add_runs(database, session_id, added.lastrowid or 0, entries)


def _delete(database: sqlite3.Connection, line: Line, bases: Bases) -> None:
    pending = not line.get("done")
    for name in line["segments"]:
        database.execute(
            "INSERT INTO deleted VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET pending = min(pending, excluded.pending)",
            (name, pending, line["at"]),
        )
    _forget(database, bases, line["segments"])


def _forget(database: sqlite3.Connection, bases: Bases, segments: Iterable[str]) -> None:
    """Forget files that were deleted, and the runs in them."""
    for uri in [base + name for name in segments for base in {bases.bucket, bases.disk}]:
        for id, session_id in database.execute("SELECT id, session FROM files WHERE uri = ?", (uri,)).fetchall():
            database.execute("DELETE FROM runs WHERE session = ? AND file = ?", (session_id, id))
            database.execute("DELETE FROM files WHERE id = ?", (id,))


def merge_snapshot(database: sqlite3.Connection, snapshot: Path, name: str, bases: Bases) -> None:
    """Bring what a snapshot says into a catalogue's database: all or nothing.

    Raises:
        sqlite3.Error: It is damaged, or of no version that is known.
    """
    database.create_function("name_of", 1, name_of, deterministic=True)
    database.execute("ATTACH ? AS snapshot", (str(snapshot),))
    try:
        with transaction(database):
            for statement in _MERGE.split(";"):
                database.execute(statement, {"bucket": bases.bucket})
            database.execute(SUM_AGAIN)
            _forget(database, bases, [name for (name,) in database.execute("SELECT segment FROM deleted").fetchall()])
            database.execute("INSERT OR IGNORE INTO applied VALUES (?)", (name,))
    finally:
        database.execute("DETACH snapshot")


_MERGE = f"""
INSERT INTO deleted SELECT segment, pending, at FROM snapshot.deleted WHERE true
    ON CONFLICT DO UPDATE SET pending = min(pending, excluded.pending);
INSERT INTO records SELECT kind, session, value, at FROM snapshot.records WHERE true
    ON CONFLICT DO UPDATE SET value = excluded.value, at = excluded.at WHERE excluded.at > at;
UPDATE files SET archived = 1 WHERE uri NOT LIKE :bucket || '%'
    AND (name_of(uri), bytes) IN (SELECT uri, bytes FROM snapshot.files);
INSERT OR IGNORE INTO files (session, uri, bytes, sealed, rows, modified_ns, points, archived)
    SELECT session, :bucket || uri, bytes, 1, rows, 0, points, 1 FROM snapshot.files
    WHERE uri NOT IN (SELECT name_of(uri) FROM main.files);
INSERT OR IGNORE INTO runs (session, file, {_RUN})
    SELECT runs.session, files.id, {", ".join(f"runs.{name}" for name in _RUN.split(", "))}
    FROM snapshot.files AS theirs JOIN main.files AS files ON files.uri = :bucket || theirs.uri
    JOIN snapshot.runs AS runs ON runs.file = theirs.id
"""


def write_snapshot(catalogue: Path, to: Path, bases: Bases) -> set[str]:
    """Copy what a catalogue's database says of the bucket, as it is at one moment.

    Args:
        catalogue: The database, which may be written meanwhile.
        to: The copy.
        bases: What stands before segments' names.

    Returns:
        The parts and snapshots that the copy stands for.
    """
    kept = sqlite3.connect(f"{catalogue.as_uri()}?mode=ro", uri=True)
    with contextlib.closing(kept), contextlib.closing(connected(to)) as made:
        kept.backup(made)
        made.execute("PRAGMA journal_mode = OFF")
        made.execute("PRAGMA synchronous = OFF")
        applied = {name for (name,) in made.execute("SELECT name FROM applied")}
        made.create_function("name_of", 1, name_of, deterministic=True)
        for statement in _KEEP_ARCHIVED:
            made.execute(statement)
        return applied


_KEEP_ARCHIVED = (
    "DELETE FROM runs WHERE file IN (SELECT id FROM files WHERE NOT archived)",
    "DELETE FROM files WHERE NOT archived",
    "UPDATE files SET modified_ns = 0, uri = name_of(uri)",
    "DELETE FROM applied",
)


def catch_up(database: sqlite3.Connection, manifest: Manifest, names: Collection[str], folder: Path) -> bool:
    """Bring into a catalogue's database what the manifest says and it does not know yet.

    A bucket of an earlier version, which has none, is looked through instead, and gets one.

    Args:
        database: The catalogue's.
        manifest: The bucket's.
        names: What `Manifest.names` gave.
        folder: Where a snapshot is unpacked.

    Returns:
        Whether there was anything whose copies of pins and owners are yet to be `restored`.

    Raises:
        OSError: The bucket or the disk refuses.
    """
    known = {name for (name,) in database.execute("SELECT name FROM applied")}
    if {*names} - known or not names:
        database.execute("INSERT OR IGNORE INTO applied VALUES (?)", (_UNRESTORED,))
    if not names:
        lines = list[Line](old_buckets.lines(manifest.place))
        if not kept_before(manifest.place).is_dir():  # nobody knows which sessions were pinned: all are
            found = {line["segment"].partition("/")[0] for line in lines if "segment" in line}
            lines += [record("pin", session_id, True) for session_id in sorted(found)]
            if found:
                logger.warning("%s is pinned, %d sessions: which were is not known here", manifest.place, len(found))
        replay(database, manifest.write(lines), lines, manifest.bases)
        return True
    _bring(database, manifest, sorted({*names} - known), folder)
    gone = [(name,) for name in known - {*names, _UNRESTORED}]
    with transaction(database):
        database.executemany("DELETE FROM applied WHERE name = ?", gone)
    return database.execute("SELECT 1 FROM applied WHERE name = ?", (_UNRESTORED,)).fetchone() is not None


def restored(database: sqlite3.Connection) -> None:
    """Pins and owners are where the manifest's copies say."""
    database.execute("DELETE FROM applied WHERE name = ?", (_UNRESTORED,))


def kept_before(place: Place) -> Path:
    """Where a server of an earlier version kept pins, owners and clients' files of a bucket."""
    return home() / "stores" / place.id


def _bring(database: sqlite3.Connection, manifest: Manifest, names: Sequence[str], folder: Path) -> None:
    for name in filter(is_snapshot, names):
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as unpacked:
            manifest.fetch(name, path := Path(unpacked, "snapshot"))
            merge_snapshot(database, path, name, manifest.bases)
    for name, lines in manifest.read([name for name in names if not is_snapshot(name)]):
        replay(database, name, lines, manifest.bases)


def fill_new(path: Path, manifest: Manifest) -> None:
    """Have the newest snapshot be a catalogue's database, where that is new; a snapshot of another layout is left.

    Args:
        path: The database's file, which is replaced.
        manifest: The bucket's.

    Raises:
        OSError: The bucket or the disk refuses.
    """
    snapshots = sorted(filter(is_snapshot, manifest.names()))
    if not snapshots:
        return
    unpacked = path.with_name(".new-" + path.name)
    manifest.fetch(snapshots[-1], unpacked)
    with contextlib.closing(connected(unpacked)) as database:
        if database.execute("PRAGMA user_version").fetchone() != (LAYOUT,):
            unpacked.unlink()
            return
        with transaction(database):
            database.execute("UPDATE files SET uri = ? || uri", (manifest.bases.bucket,))
            database.execute("UPDATE origin SET inode = ?", (os.stat(unpacked).st_ino,))
            database.executemany("INSERT INTO applied VALUES (?)", [(snapshots[-1],), (_UNRESTORED,)])
    unpacked.rename(path)


# ---- for who reads a bucket by its URI

_read: dict[str, tuple[frozenset[str], sqlite3.Connection]] = {}  # by place, what was read of it last


def read_manifest(place: Place) -> sqlite3.Connection | None:
    """A catalogue's database, in memory, of what a bucket's manifest says; None where it has none.

    Raises:
        OSError: The bucket refuses.
    """
    manifest = Manifest(place)
    names = frozenset(manifest.names())
    if not names:
        return None
    before = _read.get(key := f"{place.id} {place.path}")
    if before is None or before[0] != names:
        database = connected(":memory:")
        lay_out(database, 0)
        _bring(database, manifest, sorted(names), Path(tempfile.gettempdir()))
        before = _read[key] = names, database
    return before[1]


def catalogue_of(place: Place) -> sqlite3.Connection:
    """The same, or of a bucket of an earlier version what its objects say.

    Raises:
        OSError: The bucket refuses.
    """
    database = read_manifest(place)
    if database is None:
        database = connected(":memory:")
        lay_out(database, 0)
        replay(database, None, old_buckets.lines(place), Bases(place.uri))
    return database


def segments_in(place: Place) -> list[File]:
    """The Arrow files of a bucket, or of a session in it, by their names.

    Raises:
        OSError: The bucket refuses.
    """
    database, root, session_id = _at(place)
    if database is None:
        return old_buckets.counted(place) or old_buckets.counted(place, deep=True)
    found = database.execute("SELECT uri FROM files WHERE ? IN ('', session) ORDER BY uri", (session_id,))
    return [root.file(unquote(name_of(uri))) for (uri,) in found]


def find_runs(place: Place, runs: Collection[str]) -> list[tuple[str, File, int]]:
    """The files of a bucket, or of a session in it, that hold runs, each with its run and the byte where that begins.

    None where there is no manifest.

    Raises:
        OSError: The bucket refuses.
    """
    database, root, session_id = _at(place)
    if database is None:
        return []
    found = database.execute(
        """SELECT runs.run_id, files.uri, runs.offset FROM runs JOIN files ON files.id = runs.file
        WHERE runs.run_id IN (SELECT value FROM json_each(?)) AND ? IN ('', runs.session)""",
        (json.dumps([*runs]), session_id),
    )
    return [(run_id, root.file(unquote(name_of(uri))), offset) for run_id, uri, offset in found.fetchall()]


def _at(place: Place) -> tuple[sqlite3.Connection | None, Place, str]:
    """The manifest that tells of a place, the bucket that it is of, and the session that the place is, or ''."""
    if (database := read_manifest(place)) is not None:
        return database, place, ""
    above = place.above
    return (read_manifest(above) if above.path else None), above, place.path.rpartition("/")[2]
