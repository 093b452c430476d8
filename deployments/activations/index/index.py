"""The index of a store as its process writes it, and as others read it."""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from deployments.activations.facts import FileUpdate, SessionName, StoreError, explain, public_uri
from deployments.activations.index.database import (
    code_of,
    forget,
    in_memory,
    index_path,
    opened,
    put,
    read_only,
    refresh,
    transaction,
)
from deployments.activations.index.queries import Queries

_T = TypeVar("_T")
_NOTHING: Any = object()  # no answer

_AGAIN_S = 300.0  # after which files that could not be read are tried again
_REFUSED = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY}  # codes of a disk that refuses writes alone
# Codes of errors in what was asked: any other means that the database or the disk fails.
_ASKED = {0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISUSE}
logger = logging.getLogger(__name__)


class Index(Queries):
    """Sessions, runs and files. Safe to use from several threads.

    Where the disk refuses to write the database, the index answers with what it had, and reads the files again later. A
    damaged database is made again from the files.
    """

    def __init__(self, database: sqlite3.Connection, root: Path, archive: str = "", path: Path | None = None) -> None:
        """An index in `database`, at `path` if it is no other's, of the files of a directory and of its bucket."""
        self.root, self.archive, self.archive_uri = root, public_uri(archive), archive
        self._lock, self._database, self._path = RLock(), database, path
        self._again = math.inf  # when to scan the files again, by the monotonic clock

    @classmethod
    def open(cls, root: Path, archive: str = "", path: Path | None = None) -> Index:
        """The index of a directory, kept at `path`, by default `index_path`. Only one process may open it.

        Only files that the database does not know are read; links are not followed. StoreError if the disk refuses, or
        if another bucket than `archive` alone has some files.
        """
        path = path or index_path(root)
        try:
            index = cls(opened(path), root, archive, path)
        except (OSError, sqlite3.Error) as error:
            raise explain(path, error) from error
        index._guarded(index._refresh)
        index._check_archive()
        return index

    @classmethod
    def scanned(cls, root: Path) -> Index:
        """An index in memory, made from the files. OSError if the directory cannot be read."""
        index = cls(in_memory(), root)
        refresh(index._database, root)
        return index

    @classmethod
    def reading(cls, root: Path) -> Index | None:
        """The index that a server of this machine keeps, read only; None if there is none."""
        try:
            database = read_only(index_path(root))
            archive = database.execute("SELECT uri FROM archive").fetchone()
            return cls(database, root, archive[0] if archive else "")
        except (OSError, sqlite3.Error):
            return None

    @classmethod
    def sealed_files(cls, root: Path) -> dict[str, tuple[int, int]]:
        """As `sealed`, of the index that a server kept last; nothing where there is none, or it is damaged."""
        if (index := cls.reading(root)) is None:
            return {}
        with contextlib.closing(index), contextlib.suppress(StoreError):
            return index.sealed()
        return {}

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    def add(self, *updates: FileUpdate) -> None:
        """Add runs of files, and the files' current state: all or nothing."""

        def put_in(database: sqlite3.Connection) -> None:
            with transaction(database):
                for update in updates:
                    put(database, update)

        self._guarded(put_in, None)

    def drop(self, session: SessionName) -> bool:
        """Forget a session and its pin; whether it was known. Its objects in the bucket are to be removed then."""

        def dropped(database: sqlite3.Connection) -> bool:
            own, values = "WHERE session = ? AND owner = ?", (session.id, session.owner or "")
            with transaction(database):
                removed = f"INSERT OR IGNORE INTO removals SELECT path FROM files {own} AND archived"
                database.execute(removed, values)
                for table in ("files", "pins", "sums"):  # the sums at once, not run by run
                    database.execute(f"DELETE FROM {table} {own}", values)
                return database.execute(f"DELETE FROM runs {own}", values).rowcount > 0

        return self._guarded(dropped)

    def pin(self, session: SessionName, pinned: bool) -> None:
        """Pin a session, or take its pin away."""
        added, removed = "INSERT OR IGNORE INTO pins VALUES (?, ?)", "DELETE FROM pins WHERE (session, owner) = (?, ?)"
        self.change(added if pinned else removed, (session.id, session.owner or ""))

    def forget(self, paths: Collection[str]) -> None:
        """Forget files and the runs in them."""
        self._guarded(lambda database: forget(database, paths), None)

    def look(self, of: Collection[SessionName] | None = None) -> None:
        """Scan the files of all sessions or some again, which other programs may have changed."""
        self._guarded(lambda database: self._refresh(database, of))

    def change(self, statement: str, *rows: Sequence[Any]) -> None:
        """Execute a statement with each of some rows of values: all or nothing."""

        def changed(database: sqlite3.Connection) -> None:
            with transaction(database):
                database.executemany(statement, rows)

        self._guarded(changed)

    def select(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement selects."""
        return self._guarded(lambda database: database.execute(statement, values).fetchall())

    def _check_archive(self) -> None:
        """Take another bucket than before for one that has nothing yet."""
        known = "".join(uri for (uri,) in self.select("SELECT uri FROM archive"))
        if public_uri(known) != self.archive:
            [(away,)] = self.select("SELECT count(*) FROM files WHERE NOT local")
            if away:
                raise StoreError(
                    f"{away} files of the activation store at {self.root} are only in {public_uri(known)}: start with "
                    "it as archive, or copy its objects to the directory first"
                )
            self.change("UPDATE files SET archived = 0", ())
            self.change("DELETE FROM removals", ())
        self._guarded(self._set_archive)

    def _set_archive(self, database: sqlite3.Connection) -> None:
        with transaction(database):
            database.execute("DELETE FROM archive")
            database.execute("INSERT INTO archive VALUES (?)", (self.archive_uri,))

    def _guarded(self, work: Callable[[sqlite3.Connection], _T], otherwise: _T = _NOTHING) -> _T:
        """Use the database, or one made again from the files; `otherwise` is the result if the disk refuses a write."""
        with self._lock:
            try:
                if time.monotonic() >= self._again:
                    self._refresh(self._database)
                return work(self._database)
            except sqlite3.Error as error:
                if self._path is None or code_of(error) in _ASKED:
                    raise StoreError(f"The index cannot run this query: {error}.") from error
                if code_of(error) in _REFUSED:
                    logger.error("the index %s is not up to date until it can be written: %s", self._path, error)
                    self._again = time.monotonic() + _AGAIN_S
                    if otherwise is _NOTHING:
                        raise StoreError(
                            f"The index {self._path} cannot be written ({error}): free space on the disk, or give the "
                            "server's user write permission."
                        ) from error
                    return otherwise
                logger.error("the index %s is made again from the files: %s", self._path, error)
            try:
                self._database.close()
                self._path.unlink(missing_ok=True)
                self._database = opened(self._path)
                self._set_archive(self._database)
                self._refresh(self._database)
                return work(self._database)
            except (OSError, sqlite3.Error) as error:
                raise explain(self._path, error) from error

    def _refresh(self, database: sqlite3.Connection, of: Collection[SessionName] | None = None) -> None:
        """Read new and changed files; those that cannot be read are tried again later, and their runs stay listed."""
        again, self._again = math.inf if of is None else self._again, time.monotonic() + _AGAIN_S
        try:
            if refresh(database, self.root, of):
                self._again = again
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and code_of(error) not in _REFUSED:
                raise
            logger.exception("%s cannot be looked through: the index is as it was, or empty", self.root)


class SharedIndex(Queries):
    """The index as another process reads it while the store writes; StoreError while there is none."""

    def __init__(self, root: Path, archive: str = "") -> None:
        self.root, self.archive = root, public_uri(archive)
        self._lock, self._path = RLock(), index_path(root)
        self._database: sqlite3.Connection | None = None
        self._inode = 0

    def select(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement selects."""
        with self._lock:
            try:
                if self._database is None or self._path.stat().st_ino != self._inode:  # it was replaced
                    self._database, self._inode = read_only(self._path), self._path.stat().st_ino
                return self._database.execute(statement, values).fetchall()
            except (OSError, sqlite3.Error) as error:
                self._database = None
                raise explain(self._path, error) from error
