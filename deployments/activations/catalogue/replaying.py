"""Applying a manifest's lines and snapshots to a catalogue's database, and making snapshots of one.

Every function raises OSError on an error of the bucket or the disk. `replay` changes everything or nothing. `bring`
and `catch_up` do so piece by piece; a part or snapshot that they did not finish is applied again as a whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

from deployments.activations.catalogue.database import LAYOUT, in_memory
from deployments.activations.catalogue.manifest import Line, Manifest, is_snapshot
from deployments.activations.catalogue.rows import add_runs, forget
from deployments.activations.facts import Entry, RunFacts, name_of
from deployments.activations.files.sqlite import connected, transaction

_PLACE = ("bytes", "rows", "first_row", "offset")  # a run's keys in a line, besides its facts
_UNRESTORED = "pins and owners"  # a row among the names of parts, until `restored`
_PIECE = 2000  # lines and runs that are applied at once; a segment's are one piece
Change = Callable[[Callable[[sqlite3.Connection], object]], object]

logger = logging.getLogger(__name__)


def deletion(session_id: str, segments: Iterable[str], *, done: bool = False) -> Line:
    """The line for the deletion of a session's segments; `done` once their objects are removed as well."""
    return {"deleted": session_id, "segments": sorted(segments), "done": done, "at": time.time()}


def record(kind: str, session_id: str, value: Any, after: float = 0.0) -> Line:
    """The line that copies a pin (`value` true) or an owner's record; None where there is none any more.

    It counts as later than `after` (Unix seconds), which another machine's clock may have said.
    """
    return {"record": kind, "session": session_id, "value": value, "at": max(time.time(), after + 1e-6)}


def segment_lines(database: sqlite3.Connection, uris: Iterable[str]) -> dict[str, Line]:
    """The lines for files that are in the bucket, by URI, without those that the catalogue does not have."""
    lines = dict[str, Line]()
    for uri in sorted(uris):
        known = "SELECT id, bytes, rows, points FROM files WHERE uri = ?"
        for id, size, rows, points in database.execute(known, (uri,)).fetchall():
            found = database.execute("SELECT bytes, rows, first_row, offset, facts FROM runs WHERE file = ?", (id,))
            runs = [dict(zip(_PLACE, row[:4], strict=True)) | {"facts": json.loads(row[4])} for row in found]
            line = {"segment": name_of(uri), "bytes": size, "rows": rows, "points": json.loads(points), "runs": runs}
            lines[uri] = line
    return lines


def replay(database: sqlite3.Connection, part: str | None, lines: Iterable[Line], manifest: Manifest) -> None:
    """Bring what lines say into a catalogue's database."""
    with transaction(database):
        for line in lines:
            if "segment" in line:
                _add(database, line, manifest)
            elif "deleted" in line:
                rows = [(name, not line.get("done"), line["at"]) for name in line["segments"]]
                database.executemany(_GONE, rows)
                _forget(database, manifest, line["segments"])
            elif "record" in line:
                value = None if line["value"] is None else json.dumps(line["value"])
                database.execute(_KEEP, (line["record"], line["session"], value, line["at"]))
        if part is not None:
            database.execute("INSERT OR IGNORE INTO applied VALUES (?)", (part,))


_GONE = "INSERT INTO deleted VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET pending = min(pending, excluded.pending)"
_KEEP = """INSERT INTO records VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value, at = excluded.at
    WHERE excluded.at > at"""


def _add(database: sqlite3.Connection, line: Line, manifest: Manifest) -> None:
    name = line["segment"]
    session_id, _, _ = name.partition("/")
    if database.execute("SELECT 1 FROM deleted WHERE segment = ?", (name,)).fetchone():
        return
    of_disk = """UPDATE files SET archived = 1 WHERE session = ? AND bytes = ?
        AND (uri = ? OR uri LIKE 'node://%' AND substr(uri, -length(?)) = ?)"""
    if database.execute(of_disk, (session_id, line["bytes"], manifest.disk + name, f"/{name}", f"/{name}")).rowcount:
        return
    new = """INSERT OR IGNORE INTO files (session, uri, bytes, sealed, rows, modified_ns, points, archived)
        VALUES (?, ?, ?, 1, ?, 0, ?, 1)"""
    values = (session_id, manifest.bucket + name, line["bytes"], line["rows"], json.dumps(line["points"]))
    if (added := database.execute(new, values)).rowcount:
        runs = [(RunFacts.of(run["facts"]), {name: run[name] for name in _PLACE}) for run in line["runs"]]
        entries = [Entry(facts, "", points={}, **place) for facts, place in runs]
        add_runs(database, session_id, added.lastrowid or 0, entries)


def _forget(database: sqlite3.Connection, manifest: Manifest, segments: Iterable[str]) -> None:
    """Forget files that were deleted, and the runs in them."""
    forget(database, [base + name for name in segments for base in {manifest.bucket, manifest.disk}])


def snapshot_lines(snapshot: sqlite3.Connection) -> Iterator[Line]:
    """What a snapshot says, as lines of a part; sqlite3.Error if it is damaged."""
    gone = "SELECT json_group_array(segment), pending, at FROM deleted GROUP BY at, pending"
    for segments, pending, at in snapshot.execute(gone):
        yield {"deleted": None, "segments": json.loads(segments), "done": not pending, "at": at}
    for kind, session_id, value, at in snapshot.execute("SELECT kind, session, value, at FROM records"):
        yield {"record": kind, "session": session_id, "value": value and json.loads(value), "at": at}
    for (uri,) in snapshot.execute("SELECT uri FROM files"):
        yield from segment_lines(snapshot, [uri]).values()


def write_snapshot(catalogue: Path, to: Path) -> set[str]:
    """Copy a catalogue's entries of the bucket; returns the names of the parts that the copy replaces."""
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


def catch_up(change: Change, known: Set[str], manifest: Manifest, folder: Path) -> None:
    """Bring news of the manifest into a catalogue that has applied `known`, as `bring`."""
    names = manifest.names().keys()
    if names - known or not names:
        change(lambda database: database.execute("INSERT OR IGNORE INTO applied VALUES (?)", (_UNRESTORED,)))
    if not names:
        _apply(change, manifest.write([]), [], manifest)
        return
    bring(change, manifest, sorted(names - known), folder)
    gone = [(name,) for name in known - names - {_UNRESTORED}]
    change(lambda database: database.executemany("DELETE FROM applied WHERE name = ?", gone))


def has_caught_up(database: sqlite3.Connection) -> bool:
    """Whether `catch_up` was ever done, and records `restored`: a new database has yet to learn what the bucket has."""
    names = {name for (name,) in database.execute("SELECT name FROM applied")}
    return bool(names) and _UNRESTORED not in names


def restored(database: sqlite3.Connection) -> None:
    """Pins and owners are where the manifest's copies say."""
    database.execute("DELETE FROM applied WHERE name = ?", (_UNRESTORED,))


def bring(change: Change, manifest: Manifest, names: Sequence[str], folder: Path) -> None:
    """Apply these parts and snapshots to a catalogue, whose database `change` gives for a piece of them at a time.

    Nothing is fetched or parsed meanwhile. Snapshots are unpacked in `folder`.
    """
    for name in filter(is_snapshot, names):
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as unpacked:
            manifest.fetch(name, path := Path(unpacked, "snapshot"))
            with contextlib.closing(sqlite3.connect(path)) as snapshot:
                _apply(change, name, snapshot_lines(snapshot), manifest)
    for name, lines in manifest.read([name for name in names if not is_snapshot(name)]):
        _apply(change, name, lines, manifest)


def lent(database: sqlite3.Connection) -> Change:
    """The `Change` of a database that nobody else uses."""
    return lambda work: work(database)


def _apply(change: Change, name: str, lines: Iterable[Line], manifest: Manifest) -> None:
    piece, size = list[Line](), 0
    for line in lines:
        piece.append(line)
        size += 1 + len(line.get("runs", ()))
        if size >= _PIECE:
            change(partial(replay, part=None, lines=piece, manifest=manifest))
            piece, size = [], 0
    change(partial(replay, part=name, lines=piece, manifest=manifest))


def begun(manifest: Manifest) -> sqlite3.Connection:
    """A catalogue's database as of `in_memory`, filled as by `fill_new`."""
    with tempfile.TemporaryDirectory() as folder:
        fill_new(manifest, path := Path(folder, "snapshot"))
        if not path.exists():
            return in_memory()
        made = connected("")
        with contextlib.closing(connected(path)) as filled:
            filled.backup(made)
        return made


def fill_new(manifest: Manifest, path: Path) -> None:
    """Use the newest snapshot as a new catalogue's database, unless it has another layout or cannot be read."""
    unpacked = path.with_name(".new-" + path.name)
    try:
        if not (snapshots := sorted(filter(is_snapshot, manifest.names()))):
            return
        manifest.fetch(snapshots[-1], unpacked)
    except OSError:
        logger.exception("the manifest of %s cannot be read: only files of the disk are listed", manifest.place)
        return
    with contextlib.closing(connected(unpacked)) as database:
        if database.execute("PRAGMA user_version").fetchone() != (LAYOUT,):
            unpacked.unlink()
            return
        with transaction(database):
            database.execute("UPDATE files SET uri = ? || uri", (manifest.bucket,))
            database.execute("UPDATE origin SET inode = ?", (os.stat(unpacked).st_ino,))
            database.executemany("INSERT INTO applied VALUES (?)", [(snapshots[-1],), (_UNRESTORED,)])
    unpacked.rename(path)
