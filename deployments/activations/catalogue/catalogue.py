"""The catalogue of a store in an SQLite database, which can be rebuilt from the files alone."""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from deployments.activations.catalogue.buckets import catalogue_of
from deployments.activations.catalogue.database import copied, in_memory, keep, opened
from deployments.activations.catalogue.manifest import Manifest
from deployments.activations.catalogue.queries import Queries
from deployments.activations.catalogue.replaying import catch_up, fill_new
from deployments.activations.catalogue.updates import forget, put, refresh
from deployments.activations.facts import Entry, StoredFile, StoreError
from deployments.activations.failures import explain
from deployments.activations.files.places import Place
from deployments.activations.files.sqlite import transaction

_T = TypeVar("_T")
_NOTHING: Any = object()  # no answer

_AGAIN_S = 30.0  # after which files that could not be read are tried again
# Primary result codes that mean that the database or the disk fails, whatever the statement.
_FAULTS = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOTADB,
}
Added = Sequence[tuple[str, Sequence[Entry], StoredFile]]
"""Runs that were added, by session and file."""

logger = logging.getLogger(__name__)


class Catalogue(Queries):
    """Sessions, runs and files. Safe to use from several threads.

    Where the disk refuses to write the database, the catalogue answers with what it had, and reads the files again
    later. A database that is damaged is made again of the files. The log says why.

    Attributes:
        looks: How often the files were scanned: cached results from before may be outdated.
        tell: Called with runs after they were added.
        remade: How often the database was made again: of runs on other nodes the files of this one say nothing.
    """

    def __init__(self, database: sqlite3.Connection | None = None) -> None:
        """A catalogue of no directory, in `database` or in memory."""
        self.looks = self.remade = 0
        self.tell: Callable[[Added], None] = lambda added: None
        self._lock = Lock()
        self._root: Path | None = None  # the directory whose files it lists
        self._manifest: Manifest | None = None
        self._fill: Callable[[Path], None] | None = None
        self._again = math.inf  # when to scan the files again, by the monotonic clock
        self._release: Callable[[], object] = lambda: None
        self._database = database or in_memory()

    @classmethod
    def rebuild(cls, root: Path, manifest: Manifest | None = None) -> Catalogue:
        """The catalogue of a directory and, if there is one, of the bucket it archives to.

        Only files that the directory's database does not know are read; links are not followed.

        Args:
            root: The store's directory.
            manifest: Of the bucket. Where it cannot be read, the catalogue is without its news until `catch_up`.

        Raises:
            StoreError: The database cannot be kept in the directory, or another process keeps it.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = keep(root)
            try:
                fill = partial(_fill, manifest) if manifest else None
                catalogue = cls(opened(root, fill))
            except BaseException:
                os.close(lock)
                raise
        except (OSError, sqlite3.Error) as error:
            raise explain(root, error) from error
        catalogue._release = release = weakref.finalize(catalogue, os.close, lock)
        release.atexit = False  # a writer's thread may still need it
        catalogue._root, catalogue._manifest, catalogue._fill = root, manifest, fill
        catalogue.archives = manifest is not None
        catalogue._guarded(catalogue._look)
        return catalogue

    @classmethod
    def copied(cls, root: Path | Place) -> Catalogue:
        """The catalogue of a directory or bucket in memory, whoever keeps its database; nothing is written."""
        if isinstance(root, Place):
            return cls(catalogue_of(root))
        catalogue = cls(copied(root))
        refresh(catalogue._database, root)
        return catalogue

    def catch_up(self) -> bool:
        """Apply what is new in the bucket's manifest; whether anything was.

        Raises:
            OSError: The bucket refuses.
        """
        manifest, root = self._manifest, self._root
        if manifest is None or root is None:
            return False
        names = manifest.names()

        def caught_up(database: sqlite3.Connection) -> bool:
            news = catch_up(database, manifest, names, root)
            if news:
                self._look(database)
            return news

        return self._guarded(caught_up)

    def close(self) -> None:
        """Release the database for another catalogue."""
        with self._lock:
            self._database.close()
            self._release()

    def add(self, session_id: str, entries: Iterable[Entry], file: StoredFile) -> int:
        """Add runs of one file, and the file's current state; by how many bytes it has grown."""
        added = list(entries)
        # No later scan finds the file of another node, which has to report it again: so that is an error.
        otherwise = 0 if file.uri.startswith("file:") else _NOTHING
        more: int = self._guarded(lambda database: put(database, session_id, added, file), otherwise)
        self.tell([(session_id, added, file)])
        return more

    def add_all(self, added: Added) -> None:
        """As `add`, for runs of several files: all or nothing."""

        def put_in(database: sqlite3.Connection) -> None:
            with transaction(database):
                for session_id, entries, file in added:
                    put(database, session_id, entries, file)

        self._guarded(put_in, None)
        self.tell(added)

    def drop(self, session_id: str) -> bool:
        """Forget a session; whether it was known."""

        def dropped(database: sqlite3.Connection) -> bool:
            with transaction(database):
                database.execute("DELETE FROM files WHERE session = ?", (session_id,))
                database.execute("DELETE FROM sums WHERE session = ?", (session_id,))  # at once, not run by run
                return database.execute("DELETE FROM runs WHERE session = ?", (session_id,)).rowcount > 0

        return self._guarded(dropped, True)

    def forget_files(self, beginning: str) -> None:
        """Forget all files whose URIs begin so, and their runs."""
        begin = "SELECT uri FROM files WHERE substr(uri, 1, ?) = ?"
        found = [uri for (uri,) in self._all(begin, len(beginning), beginning)]
        if found:
            self._guarded(lambda database: forget(database, found))

    def look(self) -> None:
        """Scan the files again, which other programs may have changed."""
        if self._root is not None:
            self._guarded(self._look)

    def change(self, session_ids: Collection[str], work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Change the database otherwise, and the `version` of these sessions with it."""

        def changed(database: sqlite3.Connection) -> _T:
            found = work(database)
            if session_ids:
                again = "UPDATE sums SET mark = random() WHERE session IN (SELECT value FROM json_each(?))"
                database.execute(again, (json.dumps([*session_ids]),))
            return found

        return self._guarded(changed)

    def _all(self, statement: str, *values: Any) -> list[Any]:
        return self._guarded(lambda database: database.execute(statement, values).fetchall())

    def _guarded(self, work: Callable[[sqlite3.Connection], _T], otherwise: _T = _NOTHING) -> _T:
        """Use the database; where it is damaged, use one that is made again of the files.

        Args:
            work: What to do.
            otherwise: The result where the disk refuses a write that a later scan of the files makes up for.

        Raises:
            StoreError: SQLite refuses the statement, or the disk a write, and `otherwise` is not given.
        """
        with self._lock:
            try:
                if time.monotonic() >= self._again:
                    self._look(self._database)
                return work(self._database)
            except sqlite3.Error as error:
                if not is_at_fault(self._database, error):
                    raise StoreError(f"The catalogue cannot look for that: {error}.") from error
                root = self._root
                if root is None:
                    raise
                if _is_refused(error):
                    logger.error("the catalogue of %s is not up to date until it can be written: %s", root, error)
                    self._again = time.monotonic() + _AGAIN_S
                    if otherwise is _NOTHING:
                        raise StoreError(f"The catalogue cannot be written ({error}): make room, or let it.") from error
                    return otherwise
                logger.error("the catalogue of %s is made again of the files: %s", root, error)
            try:
                self._database.close()
                self._database = opened(root, self._fill)
                self.remade += 1
                self._look(self._database)
                return work(self._database)
            except (OSError, sqlite3.Error) as error:
                raise explain(root, error) from error

    def _look(self, database: sqlite3.Connection) -> None:
        """Read new and changed files; what cannot be read is tried again after a while, and stays as it is."""
        assert self._root is not None
        self.looks += 1
        self._again = time.monotonic() + _AGAIN_S
        try:
            if refresh(database, self._root, self._manifest.bases if self._manifest else None):
                self._again = math.inf
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and not _is_refused(error):
                raise
            logger.exception("%s cannot be looked through: the catalogue is as it was, or empty", self._root)


def _fill(manifest: Manifest, path: Path) -> None:
    """Make a new database of the bucket's newest snapshot."""
    try:
        fill_new(path, manifest)
    except OSError:
        logger.exception("the manifest of %s cannot be read: only files of the disk are listed", manifest.place)


def is_at_fault(database: sqlite3.Connection, error: sqlite3.Error) -> bool:
    """Whether the database failed, and not the statement: then the plainest one fails, too."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _FAULTS:  # the rest of an extended code is detail
        return True
    try:
        database.execute("SELECT 1 FROM files, runs LIMIT 1")
    except sqlite3.Error:
        return True
    return False


def _is_refused(error: sqlite3.Error) -> bool:
    """Whether the disk refused to write to the database, which can still be read."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)
