"""The SQLite database of an index: its tables, where it lies, how it is opened, and rows of runs and files.

It repeats what the files say, so it may be deleted at any time while no server runs. A damaged one is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sqlite3
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployments.activations.facts import RUN_FACTS, FileUpdate, RunRecord, SessionName, StoredFile
from deployments.activations.files.disk import PIN, SessionFile, scan, sessions
from deployments.activations.segments.segments import DamagedError, is_sealed, whole_runs
from deployments.options import home
from deployments.permissions import private_directory

# An owner is '' where a session has none. `files.rows` counts the rows of the file's known runs, NULL where another
# file has some of them as well; a file without `modified_ns` is read again at the next start. `local` says whether the
# disk has the file, `archived` whether the bucket has it. The indexes cover what filters and sums use, so that neither
# reads the runs themselves. `sums` are totals by session and model with the time of the last run, kept by triggers.
# `removals` are objects that are to be removed from the bucket, whose URI with its settings is in `archive`.
_TABLES = """
CREATE TABLE files (
    id INTEGER PRIMARY KEY, owner TEXT NOT NULL, session TEXT NOT NULL, path TEXT NOT NULL UNIQUE,
    bytes INTEGER NOT NULL, sealed INTEGER NOT NULL, rows INTEGER, modified_ns INTEGER, points TEXT NOT NULL,
    archived INTEGER NOT NULL DEFAULT 0, local INTEGER NOT NULL DEFAULT 1
);

CREATE INDEX files_by_session ON files (session, owner, rows, bytes, archived);

CREATE INDEX files_to_archive ON files (id) WHERE sealed AND local AND NOT archived;

CREATE TABLE runs (
    owner TEXT NOT NULL, session TEXT NOT NULL, run_id TEXT NOT NULL, file INTEGER NOT NULL, created REAL NOT NULL,
    model TEXT NOT NULL, sample_id TEXT, tags TEXT NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
    rows INTEGER NOT NULL, first_row INTEGER NOT NULL, offset INTEGER NOT NULL, facts TEXT NOT NULL,
    UNIQUE (run_id, session, owner)
);

CREATE INDEX runs_by_session ON runs (session, owner, created, run_id, model, sample_id, tags, tokens, bytes);

CREATE INDEX runs_by_time ON runs (created, run_id, owner, model, sample_id, tags);

CREATE INDEX runs_by_file ON runs (file);

CREATE TABLE sums (
    session TEXT NOT NULL, owner TEXT NOT NULL, model TEXT NOT NULL, runs INTEGER NOT NULL, tokens INTEGER NOT NULL,
    bytes INTEGER NOT NULL, last REAL NOT NULL, PRIMARY KEY (session, owner, model)
) WITHOUT ROWID;

CREATE INDEX sums_by_age ON sums (last, session, owner);

CREATE TABLE pins (session TEXT, owner TEXT, PRIMARY KEY (session, owner)) WITHOUT ROWID;

CREATE TABLE removals (path TEXT PRIMARY KEY) WITHOUT ROWID;

CREATE TABLE archive (uri TEXT NOT NULL);

CREATE TRIGGER run_added AFTER INSERT ON runs BEGIN
    INSERT INTO sums VALUES (NEW.session, NEW.owner, NEW.model, 1, NEW.tokens, NEW.bytes, NEW.created)
    ON CONFLICT (session, owner, model) DO UPDATE SET runs = runs + 1, tokens = tokens + NEW.tokens,
    bytes = bytes + NEW.bytes, last = max(last, NEW.created);
END;

CREATE TRIGGER run_gone AFTER DELETE ON runs
WHEN EXISTS (SELECT 1 FROM sums WHERE session = OLD.session AND owner = OLD.owner AND model = OLD.model) BEGIN
    UPDATE sums SET runs = runs - 1, tokens = tokens - OLD.tokens, bytes = bytes - OLD.bytes
    WHERE session = OLD.session AND owner = OLD.owner AND model = OLD.model;
    DELETE FROM sums WHERE session = OLD.session AND owner = OLD.owner AND model = OLD.model AND runs = 0;
    UPDATE sums SET last =
        (SELECT max(created) FROM runs WHERE session = OLD.session AND owner = OLD.owner AND model = OLD.model)
    WHERE session = OLD.session AND owner = OLD.owner AND model = OLD.model AND last = OLD.created;
END;
"""
# A database with other facts of a run is of another layout, too.
LAYOUT = zlib.crc32(repr((_TABLES, RUN_FACTS)).encode()) >> 1

# A run that another file holds already stays that file's.
_ADD = """INSERT INTO runs (owner, session, run_id, file, created, model, sample_id, tags, tokens, bytes, rows,
    first_row, offset, facts) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""
_FACT_NAMES = [name for name in RUN_FACTS if name not in ("interventions", "logit_lens", "text")]

_UNFIT = (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.IntegrityError)  # of values that no row can have

# A file that changed less than this before it was looked at may change again without showing another time.
_TICK_NS = 2_000_000_000

logger = logging.getLogger(__name__)


def index_path(root: Path) -> Path:
    """The database of a store's directory, below `$VITRINE_HOME` on this machine's disk: WAL does not work on NFS."""
    root = root.resolve()
    name = re.sub(r"[^A-Za-z0-9_-]", "_", root.name)[:40]
    return home() / "index" / f"{name}-{hashlib.sha256(str(root).encode()).hexdigest()[:16]}.sqlite3"


def in_memory() -> sqlite3.Connection:
    """An empty database in memory, of which what the cache does not hold is in a temporary file."""
    made = _connected("")
    _lay_out(made)
    return made


def opened(path: Path) -> sqlite3.Connection:
    """A connection that writes the database at `path`; one that is damaged or of another layout is replaced."""
    private_directory(path.parent)
    if path.is_file():
        try:
            database = _connected(path)
            if database.execute("PRAGMA user_version").fetchone() == (LAYOUT,):
                if (problem := database.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
                    raise sqlite3.DatabaseError(str(problem[0]))
                _write_ahead(database)
                return database
            database.close()
        except sqlite3.OperationalError:  # it is the disk that refuses
            raise
        except sqlite3.DatabaseError as error:
            logger.warning("%s is damaged (%s): the files are read", path, error)
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)
    database = _connected(path)
    try:
        _write_ahead(database)
        _lay_out(database)
    except BaseException:  # any error: close, then re-raise
        database.close()
        raise
    return database


def read_only(path: Path) -> sqlite3.Connection:
    """A connection that reads the database at `path` while it is written; sqlite3.Error if there is none to trust."""
    database = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
    try:
        if database.execute("PRAGMA user_version").fetchone() != (LAYOUT,):
            raise sqlite3.DatabaseError(f"{path} is another version's")
    except BaseException:  # any error: close, then re-raise
        database.close()
        raise
    return database


def code_of(error: sqlite3.Error) -> int:
    """SQLite's code of an error, without the detail of extended codes; 0 where it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All that is done within, or nothing; within another, that one's."""
    if database.in_transaction:
        yield
        return
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:  # any error: roll back, then re-raise
        if database.in_transaction:  # some errors end it by themselves
            database.execute("ROLLBACK")
        raise


def _connected(path: Path | str) -> sqlite3.Connection:
    """A connection that any thread may use, one at a time, with explicit transactions."""
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA cache_size = -65536")  # KiB
    database.execute("PRAGMA temp_store = MEMORY")
    return database


def _write_ahead(database: sqlite3.Connection) -> None:
    """Consistent after a crash; what is missing then, a scan of the files adds."""
    [mode] = database.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError(f"the file system has no write-ahead log, but {mode}: set VITRINE_HOME")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA wal_autocheckpoint = 10000")  # pages: each time waits for the disk


def _lay_out(database: sqlite3.Connection) -> None:
    with transaction(database):
        for statement in _TABLES.split("\n\n"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {LAYOUT}")


def put(database: sqlite3.Connection, update: FileUpdate) -> None:
    """Add runs of one file, and the file as it is now: all or nothing. Its object in the bucket is needed again."""
    session, entries, file = update
    owner = session.owner or ""
    with transaction(database):
        row = database.execute("SELECT id, rows FROM files WHERE path = ?", (file.path,)).fetchone()
        if row is None:
            new = (
                "INSERT INTO files (owner, session, path, bytes, sealed, rows, points) VALUES (?, ?, ?, 0, 0, 0, '{}')"
            )
            row = database.execute(new, (owner, session.id, file.path)).lastrowid, 0
            database.execute("DELETE FROM removals WHERE path = ?", (file.path,))
        id, known = row
        rows = [_row(session, id, entry) for entry in entries]
        added = database.executemany(_ADD, rows).rowcount if rows else 0
        count = known + sum(entry.rows for entry in entries) if known is not None and added == len(rows) else None
        if entries and not known:
            kinds = json.dumps(dict(entries[0].points))
            database.execute("UPDATE files SET points = ? WHERE id = ?", (kinds, id))
        # Runs of the file that never came here are found at the next start.
        modified_ns = file.modified_ns if count == file.rows else None
        update_file = "UPDATE files SET bytes = ?, sealed = ?, rows = ?, modified_ns = ? WHERE id = ?"
        database.execute(update_file, (file.bytes, file.sealed, count, modified_ns, id))


def _row(session: SessionName, file: int, entry: RunRecord) -> tuple[Any, ...]:
    """A run as the table holds it, without what may be a thousand times as long as all else."""
    facts = entry.facts
    tags = "\n".join(["", *(tag_line(name, value) for name, value in facts.tags.items()), ""])
    own = {"owner": session.owner, "session_id": session.id}  # where the file lies decides whose the run is
    text = json.dumps({name: getattr(facts, name) for name in _FACT_NAMES} | own)
    return (
        *(session.owner or "", session.id, facts.run_id, file, float(facts.created), str(facts.model)),
        *(facts.sample_id, tags, int(facts.tokens), entry.bytes, entry.rows, entry.first_row, entry.offset, text),
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
    update = "UPDATE files SET local = bytes = ?, modified_ns = ? WHERE path = ? AND archived"
    return database.execute(update, (file.bytes, file.modified_ns, file.path)).rowcount > 0


def _read_pins(database: sqlite3.Connection, root: Path) -> None:
    pinned = [(session.id, session.owner or "") for session in sessions(root) if (root / session.folder / PIN).exists()]
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
