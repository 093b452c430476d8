"""Applying a manifest's parts to a catalogue's database, and snapshots, which new databases begin as.

Every function raises OSError on an error of the bucket or the disk. Each changes everything or nothing.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Collection, Iterable
from contextlib import closing
from pathlib import Path
from time import time
from typing import Any

from deployments.activations.catalogue import old_buckets
from deployments.activations.catalogue.database import LAYOUT, lay_out
from deployments.activations.catalogue.manifest import Line, Manifest, is_snapshot, newest_snapshot
from deployments.activations.catalogue.rows import facts_of, forget, put
from deployments.activations.facts import Entry, StoredFile, name_of
from deployments.activations.files.places import Place
from deployments.activations.files.sqlite import connected, transaction
from deployments.options import home

_PLACE = ("bytes", "rows", "first_row", "offset")  # a run's keys in a line, besides its facts
_UNRESTORED = "pins and owners"  # a row among the names of parts, until `restored`

logger = logging.getLogger(__name__)


def deletion(session_id: str, segments: Iterable[str], *, done: bool = False) -> Line:
    """The line for the deletion of a session's segments; `done` once their objects are removed as well."""
    return {"deleted": session_id, "segments": sorted(segments), "done": done, "at": time()}


def record(kind: str, session_id: str, value: Any) -> Line:
    """The line that copies a pin (`value` true) or an owner's record; None where there is none any more."""
    return {"record": kind, "session": session_id, "value": value, "at": time()}


def segment_line(database: sqlite3.Connection, uri: str) -> Line:
    """The line for a file of the catalogue that is in the bucket."""
    known = "SELECT id, bytes, rows, points FROM files WHERE uri = ?"
    id, size, rows, points = database.execute(known, (uri,)).fetchone()
    found = database.execute("SELECT bytes, rows, first_row, offset, facts FROM runs WHERE file = ?", (id,))
    runs = [dict(zip(_PLACE, row[:4], strict=True)) | {"facts": json.loads(row[4])} for row in found]
    return {"segment": name_of(uri), "bytes": size, "rows": rows, "points": json.loads(points), "runs": runs}


def replay(database: sqlite3.Connection, part: str | None, lines: Iterable[Line], manifest: Manifest) -> None:
    """Bring what lines say into a catalogue's database."""
    with transaction(database):
        for line in lines:
            if "segment" in line:
                _add(database, line, manifest)
            elif "deleted" in line:
                rows = [(name, not line.get("done"), line["at"]) for name in line["segments"]]
                database.executemany(_GONE, rows)
                forget(database, [at + name for name in line["segments"] for at in (manifest.bucket, manifest.disk)])
            elif "record" in line:
                value = None if line["value"] is None else json.dumps(line["value"])
                database.execute(_KEEP, (line["record"], line["session"], value, line["at"]))
        if part is not None:
            database.execute("INSERT OR IGNORE INTO applied VALUES (?)", (part,))


_GONE = "INSERT INTO deleted VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET pending = min(pending, excluded.pending)"
_KEEP = """INSERT INTO records VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value, at = excluded.at
    WHERE excluded.at > at"""
_ARCHIVED = """UPDATE files SET archived = 1 WHERE session = ? AND bytes = ?
    AND (uri IN (?, ?) OR uri LIKE 'node://%' AND substr(uri, -length(?)) = ?)"""


def _add(database: sqlite3.Connection, line: Line, manifest: Manifest) -> None:
    name, size = line["segment"], line["bytes"]
    session_id, _, _ = name.partition("/")
    if database.execute("SELECT 1 FROM deleted WHERE segment = ?", (name,)).fetchone():
        return
    uri, end = manifest.bucket + name, f"/{name}"
    known = (session_id, size, uri, manifest.disk + name, end, end)
    if not database.execute(_ARCHIVED, known).rowcount:
        entries = [
            Entry(facts_of(run["facts"]), uri, points=line["points"], **{key: run[key] for key in _PLACE})
            for run in line["runs"]
        ]
        put(database, session_id, entries, StoredFile(uri, size, True, line["rows"], 0))
        database.execute(_ARCHIVED, known)


def write_snapshot(catalogue: Path, to: Path) -> set[str]:
    """Copy a catalogue's entries of the bucket; returns the names of the parts and snapshots that the copy replaces."""
    kept = sqlite3.connect(f"{catalogue.as_uri()}?mode=ro", uri=True)
    with closing(kept), closing(connected(to)) as made:
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


def begin_as_snapshot(manifest: Manifest, path: Path) -> None:
    """Have the newest snapshot be a new catalogue's database; one that is out of reach is logged."""
    try:
        if snapshot := newest_snapshot(manifest.names()):
            unpacked(manifest, snapshot, path.parent).rename(path)
    except OSError:
        logger.exception("the manifest of %s cannot be read: only files of the disk are listed", manifest.place)


def unpacked(manifest: Manifest, snapshot: str, folder: Path) -> Path:
    """A catalogue's database of what a snapshot says, a file in a folder that is to be renamed."""
    made = folder / ".new-snapshot"
    manifest.fetch(snapshot, made)
    with closing(connected(made)) as database:
        is_ours = database.execute("PRAGMA user_version").fetchone() == (LAYOUT,)
    if not is_ours:
        made = _converted(made)
    with closing(connected(made)) as database, transaction(database):
        database.execute("UPDATE files SET uri = ? || uri", (manifest.bucket,))
        database.execute("UPDATE origin SET inode = ?", (os.stat(made).st_ino,))
        database.executemany("INSERT INTO applied VALUES (?)", [(snapshot,), (_UNRESTORED,)])
    return made


def _converted(snapshot: Path) -> Path:
    """A database of this layout with what is in one of another version, which goes."""
    made = snapshot.with_suffix(".converted")
    made.unlink(missing_ok=True)
    with closing(connected(made)) as database:
        lay_out(database, 0)
        database.execute("ATTACH ? AS old", (str(snapshot),))
        with transaction(database):
            for table in ("files", "runs", "deleted", "records"):
                ours, theirs = (
                    [name for (name,) in database.execute(f"SELECT name FROM pragma_table_info('{table}', '{schema}')")]
                    for schema in ("main", "old")
                )
                names = ", ".join(name for name in ours if name in theirs)
                database.execute(f"INSERT INTO main.{table} ({names}) SELECT {names} FROM old.{table} ORDER BY rowid")
    snapshot.unlink()
    return made


def catch_up(database: sqlite3.Connection, manifest: Manifest, names: Collection[str]) -> bool:
    """Bring news of the manifest into a catalogue's database; whether copies of records are yet to be `restored`.

    A bucket of an earlier version, which has none, is looked through instead, and gets one.
    """
    known = _applied(database)
    if {*names} - known or not names:
        database.execute("INSERT OR IGNORE INTO applied VALUES (?)", (_UNRESTORED,))
    if not names:
        lines = list[Line](old_buckets.lines(manifest.place))
        if not kept_before(manifest.place).is_dir():  # which sessions were pinned is unknown: pin all
            found = {line["segment"].partition("/")[0] for line in lines if "segment" in line}
            lines += [record("pin", session_id, True) for session_id in sorted(found)]
            if found:
                logger.warning("%s is pinned, %d sessions: which were is not known here", manifest.place, len(found))
        replay(database, manifest.write(lines), lines, manifest)
        return True
    bring(database, manifest, names)
    with transaction(database):
        gone = [(name,) for name in known - {*names, _UNRESTORED}]
        database.executemany("DELETE FROM applied WHERE name = ?", gone)
    return _UNRESTORED in _applied(database)


def restored(database: sqlite3.Connection) -> None:
    """Pins and owners are where the manifest's copies say."""
    database.execute("DELETE FROM applied WHERE name = ?", (_UNRESTORED,))


def kept_before(place: Place) -> Path:
    """Where a server of an earlier version kept pins, owners and clients' files of a bucket."""
    return home() / "stores" / place.id


def bring(database: sqlite3.Connection, manifest: Manifest, names: Collection[str]) -> None:
    """Apply those of the parts that are new; OSError if the database does not have the newest snapshot's entries."""
    known, newest = _applied(database), newest_snapshot(names)
    if newest and newest not in known:
        raise OSError(f"{newest} of the manifest of {manifest.place} could not be read")
    for name, lines in manifest.read(sorted(name for name in names if name not in known and not is_snapshot(name))):
        replay(database, name, lines, manifest)
    older = [(name,) for name in names if is_snapshot(name)]
    with transaction(database):
        database.executemany("INSERT OR IGNORE INTO applied VALUES (?)", older)


def _applied(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM applied")}
