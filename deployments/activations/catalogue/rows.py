"""Runs and files as rows of the catalogue's database, from the files and from the writer's reports."""

from __future__ import annotations

import json
import logging
import secrets
import sqlite3
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from deployments.activations.catalogue.manifest import Manifest
from deployments.activations.facts import RUN_FACTS, Entry, PointType, RunFacts, StoredFile, name_of
from deployments.activations.files.disk import SessionFile, scan
from deployments.activations.files.places import DamagedError
from deployments.activations.files.sqlite import transaction
from deployments.activations.segments.segments import is_sealed, whole_runs

ENTRIES = """SELECT runs.facts, files.uri, runs.first_row, runs.rows, runs.bytes, files.points, runs.offset,
    files.archived FROM runs JOIN files ON files.id = runs.file"""

ON_DISK = "SELECT session, uri, bytes, modified_ns FROM files WHERE uri LIKE 'file:%'"

# A run that another file holds already stays that file's.
_ADD = """INSERT INTO runs (session, run_id, file, created, model, sample_id, tags, tokens, bytes, rows, first_row,
    offset, facts) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""
_FACT_NAMES = [name for name in RUN_FACTS if name not in ("interventions", "text")]

# A file that changed less than this before it was looked at may change again without showing another time.
_TICK_NS = 2_000_000_000

logger = logging.getLogger(__name__)


def add_runs(database: sqlite3.Connection, session_id: str, file: int, entries: Sequence[Entry]) -> int:
    """Add runs of a file, by its number; how many were not known."""
    rows = [_row(session_id, file, entry) for entry in entries]
    return database.executemany(_ADD, rows).rowcount if rows else 0


def _row(session_id: str, file: int, entry: Entry) -> tuple[Any, ...]:
    """A run as the table holds it, without what may be a thousand times as long as all else."""
    facts = entry.facts
    tags = "\n".join(["", *(tag_line(name, value) for name, value in facts.tags.items()), ""])
    said = json.dumps({name: getattr(facts, name) for name in _FACT_NAMES} | {"session_id": session_id})
    return (
        *(session_id, facts.run_id, file, float(facts.created), str(facts.model), facts.sample_id, tags),
        *(int(facts.tokens), entry.bytes, entry.rows, entry.first_row, entry.offset, said),
    )


def tag_line(name: str, value: str) -> str:
    """A tag on a line of its own: JSON writes no line break."""
    return f"{json.dumps(name)}:{json.dumps(value)}"


def entries_of(found: Iterable[tuple[Any, ...]]) -> list[Entry]:
    """Runs by what `ENTRIES` selects; those of one file share its points."""
    points: dict[str, dict[str, PointType]] = {}
    entries = []
    for facts, uri, first_row, rows, size, said, offset, archived in found:
        if uri not in points:
            points[uri] = {name: PointType(tuple(shape), dtype) for name, (shape, dtype) in json.loads(said).items()}
        run = RunFacts.of(json.loads(facts))
        entries.append(Entry(run, uri, first_row, rows, size, points[uri], offset, bool(archived)))
    return entries


def refresh(
    database: sqlite3.Connection, root: Path, manifest: Manifest | None = None, of: Collection[str] | None = None
) -> bool:
    """Bring the database up to date with the files, all or those `of` some sessions; false if some cannot be read now.

    A file that is gone and archived stays; with a bucket's `manifest`, it is one of the bucket's from then on, and back
    where it is there again.
    """
    missed = list[str]()
    known = {uri: state for session, uri, *state in database.execute(ON_DISK) if of is None or session in of}
    now, changed = time.time_ns(), list[SessionFile]()
    for file in scan(root, missed, of):
        if known.get(file.uri) == [file.bytes, file.modified_ns]:
            del known[file.uri]
            continue
        settled = _settle(database, file, manifest) if manifest else file
        if settled is not file:
            known.pop(file.uri, None)
        if settled:
            changed.append(settled)
    there, bucket = {file.uri for file in changed}, manifest.bucket if manifest else ""
    for uri in known.keys() - there:
        if move(database, uri, bucket + name_of(uri) if bucket else uri):
            del known[uri]
    if known:  # those that are gone, or to be read again
        forget(database, known)
    for file in changed:
        try:
            _read(database, file, now)
        except Exception as error:
            # Whatever a file of others provokes must not keep the rest from being served.
            if type(error) in (sqlite3.OperationalError, sqlite3.DatabaseError):
                raise  # it is the database that failed
            logger.exception("%s cannot be read and is not listed", file.file)
            if isinstance(error, OSError):
                missed.append(file.uri)
            else:  # its bytes count all the same
                put(database, file.session_id, [], StoredFile(file.uri, file.bytes, False, 0, None))
    return not missed


def move(database: sqlite3.Connection, uri: str, to: str, modified_ns: int = 0) -> bool:
    """Set another URI to read an archived file from; false if there is no such file."""
    moved = "UPDATE files SET uri = ?, modified_ns = ? WHERE uri = ? AND archived"
    if not database.execute(moved, (to, modified_ns, uri)).rowcount:
        return False
    again = "UPDATE sums SET mark = random() WHERE session = (SELECT session FROM files WHERE uri = ?)"
    database.execute(again, (to,))
    return True


def _settle(database: sqlite3.Connection, file: SessionFile, manifest: Manifest) -> SessionFile | None:
    """A file on the disk as it is to be read; None where nothing is: the bucket has it, or its session was deleted.

    One whose name the bucket has, or had, for another file gets a new one: it was copied here, or changed.
    """
    uri, path, name = file.uri, file.file, name_of(file.uri)
    deleted = database.execute("SELECT at FROM deleted WHERE segment = ?", (name,)).fetchone()
    if deleted and path.stat().st_ctime <= deleted[0]:
        logger.warning("%s is removed: its session was deleted", path)  # a crash came between
        path.unlink(missing_ok=True)
        return None
    archived = "SELECT uri, bytes FROM files WHERE uri IN (?, ?) AND archived"
    found = database.execute(archived, (uri, manifest.bucket + name)).fetchone()
    if found and found[1] == file.bytes:
        move(database, found[0], uri, file.modified_ns)
        return None
    if not found and not deleted:
        return file
    if found:
        move(database, found[0], manifest.bucket + name)
    other = path.rename(path.with_name(f"{path.stem}-{secrets.token_hex(4)}.arrow"))
    logger.warning("%s is now %s: the bucket has, or had, another file of that name", path, other.name)
    return file._replace(file=other)


def forget(database: sqlite3.Connection, uris: Iterable[str]) -> None:
    """Forget files and the runs in them: all or nothing."""
    these = "uri IN (SELECT value FROM json_each(?))"
    with transaction(database):
        listed = (json.dumps([*uris]),)
        database.execute(f"DELETE FROM runs WHERE file IN (SELECT id FROM files WHERE {these})", listed)
        database.execute(f"DELETE FROM files WHERE {these}", listed)


def _read(database: sqlite3.Connection, seen: SessionFile, now: int) -> None:
    entries, sealed = list[Entry](), is_sealed(seen.file)
    settled = seen.modified_ns if seen.modified_ns < now - _TICK_NS else None
    try:
        for run in whole_runs(seen.file):
            entries.append(run.entry(seen.uri))
    except DamagedError:
        logger.exception("%s is not read to its end: the runs before are listed", seen.uri)
        settled = None  # perhaps it only came so, and the next look finds more
    rows = sum(entry.rows for entry in entries)
    put(database, seen.session_id, entries, StoredFile(seen.uri, seen.bytes, sealed, rows, settled))


def put(database: sqlite3.Connection, session_id: str, entries: Sequence[Entry], file: StoredFile) -> int:
    """Add runs of one file, and the file as it is now: all or nothing; by how many bytes it has grown."""
    with transaction(database):
        found = database.execute("SELECT id, rows, bytes FROM files WHERE uri = ?", (file.uri,)).fetchone()
        if found is None:
            new = "INSERT INTO files (session, uri, bytes, sealed, rows, points) VALUES (?, ?, 0, 0, 0, '{}')"
            found = database.execute(new, (session_id, file.uri)).lastrowid, 0, 0
        id, known, size = found
        added = add_runs(database, session_id, id, entries)
        count = known + sum(entry.rows for entry in entries) if known is not None and added == len(entries) else None
        if entries and not known:
            said = json.dumps(dict(entries[0].points))
            database.execute("UPDATE files SET points = ? WHERE id = ?", (said, id))
        # Runs of the file that never came here are found at the next start.
        modified_ns = file.modified_ns if count == file.rows else None
        told = "UPDATE files SET bytes = ?, sealed = ?, rows = ?, modified_ns = ? WHERE id = ?"
        database.execute(told, (file.bytes, file.sealed, count, modified_ns, id))
    return file.bytes - int(size)
