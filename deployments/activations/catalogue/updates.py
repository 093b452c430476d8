"""What goes into the catalogue's database: what the files say, and what the writer tells of them."""

from __future__ import annotations

import json
import logging
import secrets
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from deployments.activations.catalogue.entries import add_runs
from deployments.activations.catalogue.manifest import Bases
from deployments.activations.facts import Entry, PointType, StoredFile, name_of
from deployments.activations.files.places import DamagedError
from deployments.activations.files.scan import Seen, scan
from deployments.activations.files.sqlite import transaction
from deployments.activations.segments.schema import point_types
from deployments.activations.segments.segments import is_sealed, whole_runs

# A file that changed less than this before it was looked at may change again without showing another time.
_TICK_NS = 2_000_000_000

logger = logging.getLogger(__name__)


def refresh(database: sqlite3.Connection, root: Path, bases: Bases | None = None) -> bool:
    """Make the database say what the files say; false if some could not be read, which may be otherwise later.

    A file that is gone and in the bucket is one of the bucket's from then on, and the other way round where it is back.

    Args:
        database: The catalogue's.
        root: The store's directory.
        bases: What stands before segments' names, where there is a bucket.
    """
    missed = list[str]()
    on_disk = "SELECT uri, bytes, modified_ns FROM files WHERE uri LIKE 'file:%'"
    known = {uri: (size, modified_ns) for uri, size, modified_ns in database.execute(on_disk)}
    now, changed = time.time_ns(), list[Seen]()
    for file in scan(root, missed):
        uri = file.file.as_uri()
        if known.get(uri) == (file.bytes, file.modified_ns):
            del known[uri]
            continue
        settled = _settle(database, file, bases) if bases else file
        if settled is not file:
            known.pop(uri, None)
        if settled:
            changed.append(settled)
    if bases:
        there = {file.file.as_uri() for file in changed}
        for uri in [uri for uri in known if uri not in there and move(database, uri, bases.bucket + name_of(uri))]:
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
                missed.append(file.file.as_uri())
            else:  # its bytes count all the same
                put(database, file.session_id, [], StoredFile(file.file.as_uri(), file.bytes, False, 0, None))
    return not missed


def move(database: sqlite3.Connection, uri: str, to: str, modified_ns: int = 0) -> bool:
    """Say of a file that is in the bucket that it is to be read elsewhere; false where it is none."""
    moved = "UPDATE files SET uri = ?, modified_ns = ? WHERE uri = ? AND archived"
    if not database.execute(moved, (to, modified_ns, uri)).rowcount:
        return False
    again = "UPDATE sums SET mark = random() WHERE session = (SELECT session FROM files WHERE uri = ?)"
    database.execute(again, (to,))
    return True


def _settle(database: sqlite3.Connection, file: Seen, bases: Bases) -> Seen | None:
    """A file on the disk as it is to be read; None where nothing is: the bucket has it, or its session was deleted.

    One whose name the bucket has, or had, for another file gets a new one: somebody copied it here, or changed it.
    """
    uri, path = file.file.as_uri(), file.file
    name = name_of(uri)
    deleted = database.execute("SELECT at FROM deleted WHERE segment = ?", (name,)).fetchone()
    if deleted and path.stat().st_ctime <= deleted[0]:
        logger.warning("%s is removed: its session was deleted", path)  # a crash came between
        path.unlink(missing_ok=True)
        return None
    archived = "SELECT uri, bytes FROM files WHERE uri IN (?, ?) AND archived"
    found = database.execute(archived, (uri, bases.bucket + name)).fetchone()
    if found and found[1] == file.bytes:
        move(database, found[0], uri, file.modified_ns)
        return None
    if not found and not deleted:
        return file
    if found:
        move(database, found[0], bases.bucket + name)
    other = path.rename(path.with_name(f"{path.stem}-{secrets.token_hex(4)}.arrow"))
    logger.warning("%s is now %s: the bucket has, or had, another file of that name", path, other.name)
    return file._replace(file=other)


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
    try:
        for run in whole_runs(seen.file):
            points = points or point_types(run.batches[0].schema)
            own = sum(batch.num_rows for batch in run.batches)
            rows += own
            entries.append(Entry(run.facts, uri, run.first_row, own, run.bytes, points, run.offset, run.batch))
    except DamagedError:
        logger.exception("%s is not read to its end: the runs before are listed", uri)
        settled = None  # perhaps it only came so, and the next look finds more
    put(database, seen.session_id, entries, StoredFile(uri, seen.bytes, sealed, rows, settled))


def put(database: sqlite3.Connection, session_id: str, entries: Sequence[Entry], file: StoredFile) -> int:
    """Add runs of one file, and the file as it is now: all or nothing.

    Returns:
        How many bytes more the file has than was known.
    """
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
