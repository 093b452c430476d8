"""What a store keeps besides runs, in one SQLite database: pins, limits, profiles, owners, nodes and deletions.

Unlike the catalogue, it cannot be rebuilt from files. Only the store's process writes it. Each change is durable when
the call returns, and other processes of the machine see it at once.
"""

from __future__ import annotations

import errno
import json
import logging
import sqlite3
import stat
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import RLock
from typing import Any

from deployments.activations.facts import StoreError, check_session_id, explain
from deployments.activations.files.sqlite import code_of, connected, transaction
from deployments.activations.limits import Retention
from deployments.errors import RequestError

NAME = ".state.sqlite"  # no session id begins with '.'
_TABLES = """
CREATE TABLE IF NOT EXISTS pins (session TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owners (
    session TEXT PRIMARY KEY, owner TEXT, shared INTEGER NOT NULL, fence TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS limits (life TEXT PRIMARY KEY, said TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS profiles (
    name TEXT NOT NULL, owner TEXT NOT NULL, model TEXT, description TEXT, created REAL NOT NULL,
    is_default INTEGER NOT NULL, body TEXT NOT NULL, PRIMARY KEY (name, owner)
);
CREATE UNIQUE INDEX IF NOT EXISTS default_of_model ON profiles (model) WHERE is_default;
CREATE TABLE IF NOT EXISTS nodes (
    key TEXT PRIMARY KEY, name TEXT NOT NULL, root TEXT NOT NULL, ray_id TEXT NOT NULL, lost INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS deletions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, node TEXT NOT NULL, session TEXT NOT NULL, fence TEXT, last REAL
);
CREATE TABLE IF NOT EXISTS bucket_deletions (id INTEGER PRIMARY KEY, line TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS unrestored (id INTEGER PRIMARY KEY)
"""
_NEW = ("INSERT INTO unrestored VALUES (1)", "PRAGMA user_version = 1")  # a bucket may have copies of pins and owners
_ERRNOS = {  # what SQLite says without the system's number for it
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
}
_DAMAGED = (
    "is damaged: put a copy of it back, or remove it together with its -wal and -shm; without it no session is pinned "
    "or has an owner, unless a bucket has copies"
)

logger = logging.getLogger(__name__)


class State:
    """A connection to a store's database, opened when it is first used. Safe to use from several threads.

    With `read_only` nothing is written, and nothing found before a store has made the database. All methods, also of
    those that inherit, wait for the disk and raise StoreError where it refuses.
    """

    def __init__(self, root: Path, read_only: bool = False) -> None:
        self._path = root / NAME
        self._read_only = read_only
        self._lock = RLock()
        self._database: sqlite3.Connection | None = None
        self._inode = 0

    def rows(self, statement: str, *values: Any) -> list[Any]:
        """What a statement finds."""
        with self._connection() as database:
            return database.execute(statement, values).fetchall() if database else []

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """One transaction, durable at its end; within another one, part of that."""
        with self._connection(to_write=True) as database:
            assert database is not None
            with transaction(database):
                yield database

    def write(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Execute a statement with each of some values: one change."""
        with self.change() as database:
            database.executemany(statement, rows)

    def version(self) -> tuple[int, ...]:
        """Numbers that change with each change, by any process."""
        with self._connection() as database:
            return (*database.execute("PRAGMA data_version").fetchone(), database.total_changes) if database else (0, 0)

    @contextmanager
    def _connection(self, to_write: bool = False) -> Iterator[sqlite3.Connection | None]:
        with self._lock:
            try:
                yield self._opened(to_write)
            except sqlite3.Error as error:
                code = code_of(error)
                said = _DAMAGED if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) else str(error)
                failed = OSError(_ERRNOS.get(code, errno.EIO), said, str(self._path))
                raise explain(self._path.parent, failed) from error
            except OSError as error:
                raise explain(self._path.parent, error) from error

    def _opened(self, to_write: bool) -> sqlite3.Connection | None:
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            if self._database is not None:
                if to_write:  # the directory is away: it may be lost
                    raise
                return self._database
            if self._read_only:
                return None
        else:
            if stat.S_ISLNK(found.st_mode):
                raise OSError(errno.ELOOP, "a link is not followed", str(self._path))
            if self._database is not None and found.st_ino == self._inode:
                return self._database
        database = connected(f"{self._path.as_uri()}?mode=ro") if self._read_only else self._made()
        if database.execute("PRAGMA user_version").fetchone() == (0,):  # a store is making it
            database.close()
            return None
        weakref.finalize(self, database.close).atexit = False  # a thread may still need it
        self._database, self._inode = database, self._path.stat().st_ino
        return database

    def _made(self) -> sqlite3.Connection:
        """A database with its tables."""
        database = connected(self._path.as_uri())
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            with transaction(database):
                # One that is there is not written: the disk may be full.
                is_new = database.execute("PRAGMA user_version").fetchone() == (0,)
                for statement in (*_TABLES.split(";"), *(_NEW if is_new else ())):
                    database.execute(statement)
        except BaseException:  # any error: close, then re-raise
            database.close()
            raise
        return database


class Pins(State):
    """The pinned sessions of a store."""

    def names(self) -> frozenset[str]:
        """All of them."""
        return frozenset(name for (name,) in self.rows("SELECT session FROM pins"))

    def __contains__(self, session_id: str) -> bool:
        return session_id in self.names()

    def set(self, session_id: str, pinned: bool) -> None:
        """Pin a session, or take its pin away; durable when it returns. ValueError if the id can name no session."""
        check_session_id(session_id)
        if pinned:
            self.add([session_id])
        else:
            self.write("DELETE FROM pins WHERE session = ?", [(session_id,)])

    def add(self, session_ids: Iterable[str]) -> None:
        """Pin sessions; durable when it returns."""
        self.write("INSERT OR IGNORE INTO pins VALUES (?)", [(name,) for name in session_ids])

    def check(self, session_id: str) -> None:
        """Raise RequestError where a session is pinned: it may not be deleted."""
        if session_id in self:
            message = f"session {session_id!r} is pinned: unpin it before you delete it"
            raise RequestError(message, "session_id", "session_pinned", 409)


def saved_limits(root: Path, life: str) -> tuple[Retention, dict[str, Retention]]:
    """What `save_limits` saved in this life; no limits where it saved none, or they cannot be read."""
    try:
        for (said,) in State(root).rows("SELECT said FROM limits WHERE life = ?", life):
            limits, applications = json.loads(said)
            return Retention(**limits), {name: Retention(**own) for name, own in applications.items()}
    except (ValueError, TypeError):
        logger.exception("saved limits of %s cannot be read: nothing is limited until an application starts", root)
    return Retention(), {}


def save_limits(root: Path, life: str, limits: Retention, applications: Mapping[str, Retention]) -> None:
    """Save limits, and those that each application set, for a store that comes back by itself.

    It alone has this `life`. A full disk is logged.
    """
    said = json.dumps([asdict(limits), {name: asdict(own) for name, own in applications.items()}])
    try:
        with State(root).change() as database:
            database.execute("DELETE FROM limits")
            database.execute("INSERT INTO limits VALUES (?, ?)", (life, said))
    except StoreError:
        logger.exception("the limits of %s are not saved: they hold until the store comes back by itself", root)
