"""What goes into the catalogue's database: what the files say, and what the writer tells of them."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Iterable, Sequence

from deployments.activations.database import transaction
from deployments.activations.entries import Entry, StoredFile, row_of
from deployments.activations.facts import PointType
from deployments.activations.messages import DamagedError
from deployments.activations.objects import AnyRoot, ObjectFile
from deployments.activations.reader import is_sealed, whole_runs
from deployments.activations.scanning import Seen, scan
from deployments.activations.schema import kind_of, point_types

# A file that changed less than this before it was looked at may change again without showing another time.
_TICK_NS = 2_000_000_000
# A run that another file holds already stays that file's.
_ADD = """INSERT INTO runs (session, run_id, file, created, model, sample_id, tags, tokens, bytes, rows, first_row,
    offset, facts) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""

logger = logging.getLogger(__name__)


def refresh(database: sqlite3.Connection, root: AnyRoot) -> bool:
    """Make the database say what the files say; false if some could not be read, which may be otherwise later."""
    missed = list[str]()
    known = {
        uri: (size, modified_ns)
        for uri, size, modified_ns in database.execute("SELECT uri, bytes, modified_ns FROM files")
    }
    now, changed = time.time_ns(), list[Seen]()
    for file in scan(root, missed):
        uri = file.file.as_uri()
        if known.get(uri) == (file.bytes, file.modified_ns):
            del known[uri]
        else:
            changed.append(file)
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
                missed.append(file.file.as_uri())
            else:  # its bytes count all the same
                put(database, file.session_id, [], StoredFile(file.file.as_uri(), file.bytes, False, 0, None))
        finally:
            if isinstance(file.file, ObjectFile):
                file.file.close()
    return not missed


def forget(database: sqlite3.Connection, uris: Iterable[str]) -> None:
    """Forget files and the runs in them: all or nothing."""
    with transaction(database):
        database.execute("CREATE TEMP TABLE gone (id INTEGER PRIMARY KEY)")
        found = "INSERT INTO gone SELECT id FROM files WHERE uri = ?"
        database.executemany(found, [(uri,) for uri in uris])
        sessions = "SELECT session FROM files WHERE id IN gone"
        database.execute(f"DELETE FROM runs WHERE session IN ({sessions}) AND file IN gone")
        database.execute("DELETE FROM files WHERE id IN gone")
        database.execute("DROP TABLE gone")


def _read(database: sqlite3.Connection, seen: Seen, now: int) -> None:
    uri = seen.file.as_uri()
    sealed = is_sealed(seen.file)
    entries, points, rows = list[Entry](), dict[str, PointType](), 0
    settled = seen.modified_ns if seen.modified_ns < now - _TICK_NS else None
    kind = kind_of(seen.file.reader().schema) if sealed and isinstance(seen.file, ObjectFile) else ""
    try:
        for run in whole_runs(seen.file):
            points = points or point_types(run.batches[0].schema)
            own = sum(batch.num_rows for batch in run.batches)
            rows += own
            entries.append(Entry(run.facts, uri, run.first_row, own, run.bytes, points, run.offset))
    except DamagedError:
        logger.exception("%s is not read to its end: the runs before are listed", uri)
        settled = None  # perhaps it only came so, and the next look finds more
    put(database, seen.session_id, entries, StoredFile(uri, seen.bytes, sealed, rows, settled, kind))


def put(database: sqlite3.Connection, session_id: str, entries: Sequence[Entry], file: StoredFile) -> int:
    """Add runs of one file, and the file as it is now: all or nothing.

    Returns:
        How many bytes more the file has than was known.
    """
    rows = [row_of(session_id, entry) for entry in entries]
    with transaction(database):
        found = database.execute("SELECT id, rows, bytes FROM files WHERE uri = ?", (file.uri,)).fetchone()
        if found is None:
            new = "INSERT INTO files (session, uri, bytes, sealed, rows, points, kind) VALUES (?, ?, 0, 0, 0, '{}', '')"
            found = database.execute(new, (session_id, file.uri)).lastrowid, 0, 0
        id, known, size = found
        added = database.executemany(_ADD, [(*row[:2], id, *row[2:]) for row in rows]).rowcount if rows else 0
        count = known + sum(entry.rows for entry in entries) if known is not None and added == len(rows) else None
        if entries and not known:
            said = json.dumps(dict(entries[0].points))
            database.execute("UPDATE files SET points = ? WHERE id = ?", (said, id))
        # Runs of the file that never came here are found at the next start.
        modified_ns = file.modified_ns if count == file.rows else None
        told = "UPDATE files SET bytes = ?, sealed = ?, rows = ?, modified_ns = ?, kind = ? WHERE id = ?"
        database.execute(told, (file.bytes, file.sealed, count, modified_ns, file.kind, id))
    return file.bytes - int(size)
