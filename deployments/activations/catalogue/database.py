"""The catalogue's SQLite database. It repeats what the files contain, and is rebuilt if damaged or out of date."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from deployments.activations.facts import RUN_FACTS
from deployments.activations.files.disk import locked
from deployments.activations.files.sqlite import connected, transaction

NAME = ".catalogue.sqlite3"  # no session id begins with '.'
LOCK = ".catalogue.lock"

# `files.rows` counts the rows of the file's known runs, NULL where another file has some of them as well; a file
# without `modified_ns` is read again at the next start. The indexes cover what filters and sums use, so that neither
# reads the runs themselves. `sums` are totals by session and model, and the time of the `last` run, kept by triggers;
# their `mark` changes with each change. From a bucket's manifest come `archived`, which files are in it, `applied`, the
# parts that were read, `deleted`, segments that are gone for good (their objects too unless `pending`), and `records`,
# copies of pins and owners.
_TABLES = """
CREATE TABLE origin (inode INTEGER NOT NULL);

CREATE TABLE files (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL, uri TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL,
    sealed INTEGER NOT NULL, rows INTEGER, modified_ns INTEGER, points TEXT NOT NULL,
    archived INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX files_by_session ON files (session, rows, bytes, archived);

CREATE INDEX files_to_archive ON files (id) WHERE sealed AND NOT archived;

CREATE TABLE runs (
    session TEXT NOT NULL, run_id TEXT NOT NULL, file INTEGER NOT NULL, created REAL NOT NULL, model TEXT NOT NULL,
    sample_id TEXT, tags TEXT NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, rows INTEGER NOT NULL,
    first_row INTEGER NOT NULL, offset INTEGER NOT NULL, facts TEXT NOT NULL,
    UNIQUE (run_id, session)
);

CREATE INDEX runs_by_session ON runs (session, created, run_id, model, sample_id, tags, tokens, bytes);

CREATE INDEX runs_by_time ON runs (created, run_id, model, sample_id, tags);

CREATE INDEX runs_by_file ON runs (file);

CREATE TABLE applied (name TEXT PRIMARY KEY);

CREATE TABLE deleted (segment TEXT PRIMARY KEY, pending INTEGER NOT NULL, at REAL NOT NULL);

CREATE INDEX deleted_pending ON deleted (segment) WHERE pending;

CREATE TABLE records (kind TEXT, session TEXT, value TEXT, at REAL NOT NULL, PRIMARY KEY (kind, session));

CREATE TABLE sums (
    session TEXT NOT NULL, model TEXT NOT NULL, runs INTEGER NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
    last REAL NOT NULL, mark INTEGER NOT NULL, PRIMARY KEY (session, model)
) WITHOUT ROWID;

CREATE INDEX sums_by_age ON sums (last, session);

CREATE TRIGGER run_added AFTER INSERT ON runs BEGIN
    INSERT INTO sums VALUES (NEW.session, NEW.model, 1, NEW.tokens, NEW.bytes, NEW.created, random())
    ON CONFLICT (session, model) DO UPDATE SET runs = runs + 1, tokens = tokens + NEW.tokens,
    bytes = bytes + NEW.bytes, last = max(last, NEW.created), mark = random();
END;

CREATE TRIGGER run_gone AFTER DELETE ON runs
WHEN EXISTS (SELECT 1 FROM sums WHERE session = OLD.session AND model = OLD.model) BEGIN
    UPDATE sums SET runs = runs - 1, tokens = tokens - OLD.tokens, bytes = bytes - OLD.bytes, mark = random()
    WHERE session = OLD.session AND model = OLD.model;
    DELETE FROM sums WHERE session = OLD.session AND model = OLD.model AND runs = 0;
    UPDATE sums SET last = (SELECT max(created) FROM runs WHERE session = OLD.session AND model = OLD.model)
    WHERE session = OLD.session AND model = OLD.model AND last = OLD.created;
END;
"""
# A database with fewer facts of a run than this version has is of another layout, too.
LAYOUT = zlib.crc32(repr((_TABLES, RUN_FACTS)).encode()) >> 1

logger = logging.getLogger(__name__)


def can_hold(root: Path) -> bool:
    """Whether no process keeps a directory's database; OSError if the file system has no locks."""
    try:
        os.close(locked(root / LOCK, make=False))
    except FileNotFoundError:
        return True  # no store was ever there
    except BlockingIOError:
        return False
    return True


def read_only(root: Path) -> sqlite3.Connection:
    """A connection that reads a directory's database while it is written; sqlite3.Error if it cannot be trusted."""
    path = root / NAME
    inode = path.stat(follow_symlinks=False).st_ino
    database = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
    try:
        if not _is_laid_out(database, inode):
            raise sqlite3.DatabaseError(f"{path} is another version's or another directory's")
    except BaseException:  # any error: close, then re-raise
        database.close()
        raise
    return database


def in_memory() -> sqlite3.Connection:
    """An empty database in memory, of which what the cache does not hold is in a temporary file."""
    made = connected("")
    lay_out(made, 0)
    return made


def copied(root: Path) -> sqlite3.Connection:
    """A copy of a directory's database as of `in_memory`, if that can be trusted, else an empty one."""
    copy = connected("")
    try:
        with closing(read_only(root)) as kept:
            kept.backup(copy)
        _check_sound(copy)
    except (sqlite3.Error, OSError) as error:
        logger.info("%s cannot be copied (%s): the files are read", root / NAME, error)
        return in_memory()
    return copy


def sealed_files(root: Path) -> dict[str, tuple[int, int]]:
    """Bytes and modification times in Unix nanoseconds, by URI, of sealed files, as far as a database is known."""
    try:
        with closing(read_only(root)) as kept:
            found = kept.execute("SELECT uri, bytes, modified_ns FROM files WHERE sealed AND modified_ns IS NOT NULL")
            return {uri: (size, modified_ns) for uri, size, modified_ns in found}
    except (sqlite3.Error, OSError) as error:
        logger.info("%s cannot be read (%s): every file is looked at", root / NAME, error)
        return {}


def opened(root: Path, fill: Callable[[Path], None] | None = None) -> sqlite3.Connection:
    """A connection that writes a directory's database; one that cannot be trusted is replaced, perhaps by `fill`."""
    path = root / NAME
    if path.is_file() and not path.is_symlink():
        with contextlib.ExitStack() as unless_kept:
            try:
                database = unless_kept.enter_context(closing(connected(path)))
                if _is_laid_out(database, path.stat().st_ino):
                    _check_sound(database)
                    _logged(database)
                    unless_kept.pop_all()
                    return database
                logger.info("%s is another version's or another directory's: the files are read", path)
            except sqlite3.OperationalError:  # it is the disk that refuses
                raise
            except sqlite3.DatabaseError as error:
                logger.warning("%s is damaged (%s): the files are read", path, error)
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)
    if fill:
        fill(path)
        if path.exists():
            return opened(root)
    database = connected(path)
    try:
        _logged(database)
        lay_out(database, path.stat().st_ino)
    except BaseException:  # any error: close, then re-raise
        database.close()
        raise
    return database


def _logged(database: sqlite3.Connection) -> None:
    """Write ahead: consistent after a crash; what is missing then, a scan of the files adds."""
    [mode] = database.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError(f"the file system has no write-ahead log, but {mode}")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA wal_autocheckpoint = 10000")  # pages: each time waits for the disk


def lay_out(database: sqlite3.Connection, inode: int) -> None:
    """Create the tables of a new database, whose file has this inode."""
    with transaction(database):
        for statement in _TABLES.split("\n\n"):
            database.execute(statement)
        database.execute("INSERT INTO origin VALUES (?)", (inode,))
        database.execute(f"PRAGMA user_version = {LAYOUT}")


def _check_sound(database: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError where it is damaged."""
    if (found := database.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
        raise sqlite3.DatabaseError(str(found[0]))


def _is_laid_out(database: sqlite3.Connection, inode: int) -> bool:
    """Whether it is of this layout and in the file it was made in: a copy of a file may be inconsistent."""
    if database.execute("PRAGMA user_version").fetchone() != (LAYOUT,):
        return False
    return bool(database.execute("SELECT inode FROM origin").fetchone() == (inode,))
