"""The catalogue's SQLite database: it keeps what the files say, and is thrown away where it cannot be trusted."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path

from deployments.activations.facts import RunFacts
from deployments.activations.files.locks import locked
from deployments.activations.files.sqlite import connected, transaction

NAME = ".catalogue.sqlite3"  # no session id begins with '.'
_LOCK = ".catalogue.lock"

# `rows` of a file are those of its runs that are known, NULL where some are known from another file; without
# `modified_ns` the file is read again at the next start. The indexes hold what filters and sums look at, so that
# neither reads the runs themselves. `sums` are each session's, by model, so that a session of any size is summed up at
# once: whoever adds runs keeps them true, by `filling.add_runs`. `mark` is another one after each change.
# What `manifest` says of a bucket: `archived` files are in it, `applied` parts are known, `deleted` segments are gone
# for good, their objects too unless `pending`; `records` are copies of pins and owners.
_TABLES = """
CREATE TABLE origin (inode INTEGER NOT NULL);

CREATE TABLE files (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL, uri TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL,
    sealed INTEGER NOT NULL, rows INTEGER, modified_ns INTEGER, points TEXT NOT NULL,
    archived INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX files_by_session ON files (session);

CREATE INDEX files_to_archive ON files (id) WHERE sealed AND NOT archived;

CREATE TABLE runs (
    session TEXT NOT NULL, run_id TEXT NOT NULL, file INTEGER NOT NULL, created REAL NOT NULL, model TEXT NOT NULL,
    sample_id TEXT, tags TEXT NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, rows INTEGER NOT NULL,
    first_row INTEGER NOT NULL, offset INTEGER NOT NULL, batch INTEGER NOT NULL, facts TEXT NOT NULL,
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
    mark INTEGER NOT NULL, PRIMARY KEY (session, model)
) WITHOUT ROWID;

CREATE TRIGGER run_gone AFTER DELETE ON runs
WHEN EXISTS (SELECT 1 FROM sums WHERE session = OLD.session AND model = OLD.model) BEGIN
    UPDATE sums SET runs = runs - 1, tokens = tokens - OLD.tokens, bytes = bytes - OLD.bytes, mark = random()
    WHERE session = OLD.session AND model = OLD.model;
    DELETE FROM sums WHERE session = OLD.session AND model = OLD.model AND runs = 0;
END;
"""
# Of another layout is also what tells less of a run than this version knows.
LAYOUT = zlib.crc32(repr((_TABLES, [item.name for item in fields(RunFacts)])).encode()) >> 1

logger = logging.getLogger(__name__)


class Kept:
    """A connection to a store's database, which no other process writes meanwhile.

    Attributes:
        connection: For any thread, one at a time.
        keeper: A name of its own.
    """

    def __init__(self, root: Path, fill: Callable[[Path], None] | None = None) -> None:
        """Open what a directory keeps; a database that is damaged or of another layout is begun anew.

        Args:
            root: The directory.
            fill: Puts a database where there is none that can be trusted, or leaves it.

        Raises:
            OSError: Another process keeps it, or the disk refuses.
            sqlite3.Error: It cannot be written.
        """
        self.keeper = secrets.token_hex(16)
        self._root = root
        self._lock = locked(root / _LOCK)
        self.path = root / NAME
        try:
            self.connection = _kept(root / NAME, fill)
        except BaseException:
            os.close(self._lock)
            raise

    def say(self) -> None:
        """Have `keeper_of` give this keeper until it is closed, or another one says so."""
        try:
            os.truncate(self._lock, 0)
            os.pwrite(self._lock, self.keeper.encode(), 0)
        except OSError:
            logger.exception("readers of %s ask the store's own process", self._root)

    def close(self) -> None:
        """Let others open it."""
        try:
            with contextlib.suppress(OSError):
                os.truncate(self._lock, 0)
            self.connection.close()
        finally:
            os.close(self._lock)


def keeper_of(root: Path) -> str:
    """Who keeps a directory's database, and says so; empty where nobody does."""
    try:
        file = os.open(f"{root}/{_LOCK}", os.O_RDONLY | os.O_NOFOLLOW)  # each page of a download asks
    except OSError:
        return ""
    try:
        return os.read(file, 64).decode(errors="replace")
    finally:
        os.close(file)


def read_only(root: Path) -> sqlite3.Connection:
    """A connection that reads what a directory keeps, also beside the process that writes it.

    Raises:
        OSError: There is no database.
        sqlite3.Error: It cannot be read, or is another version's or another directory's.
    """
    path = root / NAME
    inode = path.stat().st_ino
    database = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
    try:
        if not _is_laid_out(database, inode):
            raise sqlite3.DatabaseError(f"{path} is another version's or another directory's")
    except BaseException:
        database.close()
        raise
    return database


def can_hold(root: Path) -> bool:
    """Whether this process could keep a directory's database now, which it does not do.

    Raises:
        OSError: There are no such locks.
    """
    try:
        os.close(locked(root / _LOCK, make=False))
    except FileNotFoundError:
        return True  # no store ever was there
    except BlockingIOError:
        return False
    return True


def in_memory(root: Path | None = None) -> sqlite3.Connection:
    """A database in memory: a copy of what a directory keeps, if that can be trusted, else empty.

    What the directory keeps is not written, and may be another process's that goes on writing it.
    """
    path = root / NAME if root else None
    if path and path.is_file():
        copy = connected(":memory:")
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as kept:
                kept.backup(copy)
            if _is_sound(copy, path):
                return copy
        except (sqlite3.Error, OSError) as error:
            logger.info("%s cannot be copied (%s): the files are read", path, error)
        copy.close()
    made = connected(":memory:")
    lay_out(made, 0)
    return made


def sealed_files(root: Path) -> dict[str, tuple[int, int]]:
    """The sealed files that a directory's database knows: by URI bytes, and when they changed in Unix nanoseconds.

    None where there is no database, or one that cannot be trusted.
    """
    path = root / NAME
    if not path.is_file() or path.is_symlink():
        return {}
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as kept:
            if not _is_laid_out(kept, path.stat().st_ino):
                return {}
            found = kept.execute("SELECT uri, bytes, modified_ns FROM files WHERE sealed AND modified_ns IS NOT NULL")
            return {uri: (size, modified_ns) for uri, size, modified_ns in found}
    except (sqlite3.Error, OSError) as error:
        logger.info("%s cannot be read (%s): every file is looked at", path, error)
        return {}


def _kept(path: Path, fill: Callable[[Path], None] | None = None) -> sqlite3.Connection:
    if path.is_file() and not path.is_symlink():
        database = connected(path)
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
    if fill:
        fill(path)
        if path.exists():
            return _kept(path)
    database = connected(path)
    try:
        _logged(database)
        lay_out(database, path.stat().st_ino)
    except BaseException:
        database.close()
        raise
    return database


def _logged(database: sqlite3.Connection) -> None:
    """Write ahead: consistent after any crash, if not up to date, which a look at the files puts right."""
    [mode] = database.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError(f"the file system has no write-ahead log, but {mode}")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA wal_autocheckpoint = 10000")  # pages: each time waits for the disk


def lay_out(database: sqlite3.Connection, inode: int) -> None:
    """Make the tables of an empty database, which is the file of this inode."""
    with transaction(database):
        for statement in _TABLES.split("\n\n"):
            database.execute(statement)
        database.execute("INSERT INTO origin VALUES (?)", (inode,))
        database.execute(f"PRAGMA user_version = {LAYOUT}")


def _is_sound(database: sqlite3.Connection, path: Path) -> bool:
    """Whether it is of this layout, whole, and the very file that was written."""
    if not _is_laid_out(database, path.stat().st_ino):
        return False
    if (found := database.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
        raise sqlite3.DatabaseError(str(found[0]))
    return True


def _is_laid_out(database: sqlite3.Connection, inode: int) -> bool:
    """Whether it is of this layout, and the very file that was written: a copy may be of two moments."""
    if database.execute("PRAGMA user_version").fetchone() != (LAYOUT,):
        return False
    return bool(database.execute("SELECT inode FROM origin").fetchone() == (inode,))
