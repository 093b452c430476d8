"""The SQLite database of an index: its tables, where it lies, and how it is opened.

It repeats what the files say, so it may be deleted at any time while no server runs. A damaged one is made again.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deployments.activations.facts import RUN_FACTS
from deployments.options import home

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
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        try:
            database = _connected(path)
            if database.execute("PRAGMA user_version").fetchone() == (LAYOUT,):
                if (found := database.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
                    raise sqlite3.DatabaseError(str(found[0]))
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
