"""Runs and files as rows of an index: from the files, and from what writers report."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from deployments.activations.facts import RUN_FACTS, FileUpdate, RunRecord, SessionName, StoredFile
from deployments.activations.files.disk import PIN, SessionFile, scan, sessions
from deployments.activations.index.database import transaction
from deployments.activations.segments.batches import DamagedError
from deployments.activations.segments.segments import is_sealed, whole_runs

# A run that another file holds already stays that file's.
_ADD = """INSERT INTO runs (owner, session, run_id, file, created, model, sample_id, tags, tokens, bytes, rows,
    first_row, offset, facts) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""
_FACT_NAMES = [name for name in RUN_FACTS if name not in ("interventions", "text")]

_UNFIT = (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.IntegrityError)  # of values that no row can have

# A file that changed less than this before it was looked at may change again without showing another time.
_TICK_NS = 2_000_000_000

logger = logging.getLogger(__name__)


def put(database: sqlite3.Connection, update: FileUpdate) -> None:
    """Add runs of one file, and the file as it is now: all or nothing. Its object in the bucket is needed again."""
    session, entries, file = update
    owner = session.owner or ""
    with transaction(database):
        found = database.execute("SELECT id, rows FROM files WHERE path = ?", (file.path,)).fetchone()
        if found is None:
            new = (
                "INSERT INTO files (owner, session, path, bytes, sealed, rows, points) VALUES (?, ?, ?, 0, 0, 0, '{}')"
            )
            found = database.execute(new, (owner, session.id, file.path)).lastrowid, 0
            database.execute("DELETE FROM removals WHERE path = ?", (file.path,))
        id, known = found
        rows = [_row(session, id, entry) for entry in entries]
        added = database.executemany(_ADD, rows).rowcount if rows else 0
        count = known + sum(entry.rows for entry in entries) if known is not None and added == len(rows) else None
        if entries and not known:
            said = json.dumps(dict(entries[0].points))
            database.execute("UPDATE files SET points = ? WHERE id = ?", (said, id))
        # Runs of the file that never came here are found at the next start.
        modified_ns = file.modified_ns if count == file.rows else None
        told = "UPDATE files SET bytes = ?, sealed = ?, rows = ?, modified_ns = ? WHERE id = ?"
        database.execute(told, (file.bytes, file.sealed, count, modified_ns, id))


def _row(session: SessionName, file: int, entry: RunRecord) -> tuple[Any, ...]:
    """A run as the table holds it, without what may be a thousand times as long as all else."""
    facts = entry.facts
    tags = "\n".join(["", *(tag_line(name, value) for name, value in facts.tags.items()), ""])
    own = {"owner": session.owner, "session_id": session.id}  # where the file lies decides whose the run is
    said = json.dumps({name: getattr(facts, name) for name in _FACT_NAMES} | own)
    return (
        *(session.owner or "", session.id, facts.run_id, file, float(facts.created), str(facts.model)),
        *(facts.sample_id, tags, int(facts.tokens), entry.bytes, entry.rows, entry.first_row, entry.offset, said),
    )


def tag_line(name: str, value: str) -> str:
    """A tag on a line of its own: JSON writes no line break."""
    return f"{json.dumps(name)}:{json.dumps(value)}"


def forget(database: sqlite3.Connection, paths: Iterable[str]) -> None:
    """Forget files and the runs in them: all or nothing."""
    these, listed = "path IN (SELECT value FROM json_each(?))", (json.dumps([*paths]),)
    with transaction(database):
        database.execute(f"DELETE FROM runs WHERE file IN (SELECT id FROM files WHERE {these})", listed)
        database.execute(f"DELETE FROM files WHERE {these}", listed)


def refresh(database: sqlite3.Connection, root: Path, of: Collection[SessionName] | None = None) -> bool:
    """Update the database from the files, of all sessions or those `of` some; false if some cannot be read now.

    Runs of a file that is gone are forgotten, unless it is archived.
    """
    if of is None and not database.execute("SELECT 1 FROM files LIMIT 1").fetchone():
        _read_pins(database, root)
    missed, now = list[str](), time.time_ns()
    folders = None if of is None else {session.folder for session in of}
    listed = database.execute("SELECT path, bytes, modified_ns FROM files WHERE local")
    known = {path: state for path, *state in listed if folders is None or path.rpartition("/")[0] in folders}
    changed = list[SessionFile]()
    for file in scan(root, missed, of):
        if known.get(file.path) == [file.bytes, file.modified_ns]:
            del known[file.path]
        elif _is_archived(database, file):
            known.pop(file.path, None)
        else:
            changed.append(file)
    unread = tuple(f"{folder}/" for folder in missed)
    away = {path for path in known if not path.startswith(unread)} - {file.path for file in changed}
    with transaction(database):
        archived = "UPDATE files SET local = 0 WHERE path = ? AND archived"
        database.executemany(archived, [(path,) for path in away])
        forget(database, [path for (path,) in database.execute("SELECT path FROM files WHERE local") if path in away])
    for file in changed:
        try:
            _read(database, file, now)
        except Exception as error:  # whatever a file holds, the others are served
            if isinstance(error, sqlite3.Error) and not isinstance(error, _UNFIT):
                raise
            logger.exception("%s cannot be read and is not listed", file.file)
            if isinstance(error, OSError):
                missed.append(file.path)
            else:  # its bytes count all the same
                put(database, FileUpdate(file.session, [], StoredFile(file.path, file.bytes, False, 0, None)))
    return not missed


def _is_archived(database: sqlite3.Connection, file: SessionFile) -> bool:
    """Whether the bucket has a file: what the disk has is local if it is a copy, and else damaged, and not read."""
    found = "UPDATE files SET local = bytes = ?, modified_ns = ? WHERE path = ? AND archived"
    return database.execute(found, (file.bytes, file.modified_ns, file.path)).rowcount > 0


def _read_pins(database: sqlite3.Connection, root: Path) -> None:
    pinned = [(one.id, one.owner or "") for one in sessions(root) if (root / one.folder / PIN).exists()]
    database.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?)", pinned)


def _read(database: sqlite3.Connection, seen: SessionFile, now: int) -> None:
    entries, sealed = list[RunRecord](), is_sealed(seen.file)
    settled = seen.modified_ns if seen.modified_ns < now - _TICK_NS else None
    try:
        for run in whole_runs(seen.file):
            entries.append(run.entry(seen.path))
    except DamagedError:
        logger.exception("%s is not read to its end: the runs before are listed", seen.file)
        settled = None  # perhaps it only came so, and the next look finds more
    rows = sum(entry.rows for entry in entries)
    forget(database, [seen.path])
    put(database, FileUpdate(seen.session, entries, StoredFile(seen.path, seen.bytes, sealed, rows, settled)))
