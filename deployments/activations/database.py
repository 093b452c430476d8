"""The catalogue's SQLite database: it keeps what the files say, and is thrown away where it cannot be trusted."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from pathlib import Path

from deployments.activations.facts import RunFacts

NAME = ".catalogue.sqlite3"  # no session id begins with '.'
_LOCK = ".catalogue.lock"

# `rows` of a file are those of its runs that are known, NULL where some are known from another file; without
# `modified_ns` the file is read again at the next start. The indexes hold what filters and sums look at, so that
# neither reads the runs themselves.
_TABLES = """
CREATE TABLE origin (inode INTEGER NOT NULL);
CREATE TABLE files (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL, uri TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL,
    sealed INTEGER NOT NULL, rows INTEGER, modified_ns INTEGER, points TEXT NOT NULL, kind TEXT NOT NULL
);
CREATE INDEX files_by_session ON files (session);
CREATE TABLE runs (
    session TEXT NOT NULL, run_id TEXT NOT NULL, file INTEGER NOT NULL, created REAL NOT NULL, model TEXT NOT NULL,
    sample_id TEXT, tags TEXT NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, rows INTEGER NOT NULL,
    first_row INTEGER NOT NULL, offset INTEGER NOT NULL, facts TEXT NOT NULL, UNIQUE (run_id, session)
);
CREATE INDEX runs_by_session ON runs (session, created, run_id, model, sample_id, tags, tokens, bytes);
CREATE INDEX runs_by_time ON runs (created, run_id, model, sample_id, tags);
"""
# Of another layout is also what tells less of a run than this version knows.
_LAYOUT = zlib.crc32(repr((_TABLES, [item.name for item in fields(RunFacts)])).encode()) >> 1

logger = logging.getLogger(__name__)


class Kept:
    """A connection to a store's database, which no other process writes meanwhile.

    Attributes:
        connection: For any thread, one at a time.
    """

    def __init__(self, root: Path) -> None:
        """Open what a directory keeps; a database that is damaged or of another layout is begun anew.

        Raises:
            OSError: Another process keeps it, or the disk refuses.
            sqlite3.Error: It cannot be written.
        """
        self._lock = _locked(root / _LOCK)
        try:
            self.connection = _kept(root / NAME)
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Let others open it."""
        try:
            self.connection.close()
        finally:
            os.close(self._lock)


@contextlib.contextmanager
def held_alone(root: Path) -> Iterator[None]:
    """Hold a directory as its store's process does; nothing is held where no store ever was.

    Raises:
        OSError: Another process holds it, or there are no such locks.
    """
    try:
        lock = _locked(root / _LOCK, make=False)
    except FileNotFoundError:
        yield
        return
    try:
        yield
    finally:
        os.close(lock)


def in_memory(root: Path | None = None) -> sqlite3.Connection:
    """A database in memory: a copy of what a directory keeps, if that can be trusted, else empty.

    What the directory keeps is not written, and may be another process's that goes on writing it.
    """
    path = root / NAME if root else None
    if path and path.is_file():
        copy = _connected(":memory:")
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as kept:
                kept.backup(copy)
            if _is_sound(copy, path):
                return copy
        except (sqlite3.Error, OSError) as error:
            logger.info("%s cannot be copied (%s): the files are read", path, error)
        copy.close()
    made = _connected(":memory:")
    _lay_out(made, 0)
    return made


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All that is done within, or nothing."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # some errors end it by themselves
            database.execute("ROLLBACK")
        raise


def _locked(path: Path, make: bool = True) -> int:
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if make else 0), 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise BlockingIOError(error.errno, "another process keeps it", str(path)) from error
    except OSError:
        os.close(lock)
        raise
    return lock


def _kept(path: Path) -> sqlite3.Connection:
    if path.is_file() and not path.is_symlink():
        database = _connected(path)
        try:
            if _is_sound(database, path):
                _logged(database)
                return database
            logger.info("%s is another version's or another directory's: the files are read", path)
        except sqlite3.DatabaseError as error:
            logger.warning("%s is damaged (%s): the files are read", path, error)
        database.close()
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)
    database = _connected(path)
    try:
        _logged(database)
        _lay_out(database, path.stat().st_ino)
    except BaseException:
        database.close()
        raise
    return database


def _connected(path: Path | str) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA cache_size = -65536")  # KiB
    database.execute("PRAGMA temp_store = MEMORY")
    return database


def _logged(database: sqlite3.Connection) -> None:
    """Write ahead: consistent after any crash, if not up to date, which a look at the files puts right."""
    [mode] = database.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError(f"the file system has no write-ahead log, but {mode}")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA wal_autocheckpoint = 10000")  # pages: each time waits for the disk


def _lay_out(database: sqlite3.Connection, inode: int) -> None:
    with transaction(database):
        for statement in _TABLES.split(";"):
            database.execute(statement)
        database.execute("INSERT INTO origin VALUES (?)", (inode,))
        database.execute(f"PRAGMA user_version = {_LAYOUT}")


def _is_sound(database: sqlite3.Connection, path: Path) -> bool:
    """Whether it is of this layout, whole, and the very file that was written: a copy may be of two moments."""
    if database.execute("PRAGMA user_version").fetchone() != (_LAYOUT,):
        return False
    if database.execute("SELECT inode FROM origin").fetchone() != (path.stat().st_ino,):
        return False
    if (found := database.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
        raise sqlite3.DatabaseError(str(found[0]))
    return True
