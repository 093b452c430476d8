"""The catalogue of a store: which sessions, runs and segments it has, in an SQLite database rebuilt from the files."""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from deployments.activations.catalogue.buckets import bucket_of, catalogue_of
from deployments.activations.catalogue.database import LOCK, NAME, copied, in_memory, opened, read_only
from deployments.activations.catalogue.manifest import Manifest
from deployments.activations.catalogue.queries import Queries
from deployments.activations.catalogue.replaying import bring, catch_up, fill_new, has_caught_up, lent
from deployments.activations.catalogue.rows import ON_DISK, forget, put, refresh
from deployments.activations.facts import FileUpdate, StoreError, explain
from deployments.activations.files.disk import locked, scan
from deployments.activations.files.places import Place
from deployments.activations.files.sqlite import code_of, transaction

_T = TypeVar("_T")
_NOTHING: Any = object()  # no answer

_AGAIN_S = 30.0  # after which files that could not be read are tried again
_REFUSED = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY}  # codes of a disk that refuses writes alone
# Codes that mean that the database or the disk fails, whatever the statement.
_FAULTS = _REFUSED | {
    *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOTADB),
}
logger = logging.getLogger(__name__)


class Catalogue(Queries):
    """Sessions, runs and files. Safe to use from several threads.

    Where the disk refuses to write the database, the catalogue answers with what it had, and reads the files again
    later. A damaged database is made again of the files: `remade` counts how often, since a new one knows nothing of
    other nodes' runs. `on_added` is called with runs that were added.
    """

    def __init__(
        self, database: sqlite3.Connection | None = None, root: Path | None = None, manifest: Manifest | None = None
    ) -> None:
        """A catalogue in `database`, or in memory, of the files of a directory, if any, and of its bucket."""
        self.remade, self.archives = 0, manifest is not None
        self.on_added: Callable[[Sequence[FileUpdate]], None] = lambda added: None
        self._lock, self._root, self._manifest = Lock(), root, manifest
        self._again = math.inf  # when to scan the files again, by the monotonic clock
        self._release: Callable[[], object] = lambda: None
        self._database = database or in_memory()

    @classmethod
    def rebuild(cls, root: Path, manifest: Manifest | None = None) -> Catalogue:
        """The catalogue of a directory, and of the bucket that it archives to; links are not followed.

        Only files that its database does not know are read. Where the manifest cannot be read, the catalogue is without
        its news until `catch_up`. StoreError if the database cannot be kept here, or another process keeps it.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = locked(root / LOCK)  # one process at a time writes the database
            try:
                catalogue = cls(opened(root, partial(fill_new, manifest) if manifest else None), root, manifest)
            except BaseException:  # any error: release the lock, then re-raise
                os.close(lock)
                raise
        except (OSError, sqlite3.Error) as error:
            raise explain(root, error) from error
        catalogue._release = release = weakref.finalize(catalogue, os.close, lock)
        release.atexit = False  # a writer's thread may still need it
        catalogue._guarded(catalogue._look)
        return catalogue

    @classmethod
    def copied(cls, root: Path | Place) -> Catalogue:
        """The catalogue of a directory or bucket in memory, also of one that another process writes. Writes nothing."""
        if isinstance(root, Place):
            return cls(catalogue_of(root))
        catalogue = cls(copied(root))
        refresh(catalogue._database, root)
        if not catalogue.select("SELECT 1 FROM applied") and (bucket := bucket_of(root)):  # its database is a copy
            manifest = Manifest(bucket, root=root)
            bring(lent(catalogue._database), manifest, sorted(manifest.names()), Path(tempfile.gettempdir()))
        return catalogue

    def catch_up(self) -> bool:
        """Apply what is new in the bucket's manifest; whether copies of records are yet to be `restored`.

        Others use the catalogue meanwhile. OSError if the bucket refuses.
        """
        manifest, root, remade = self._manifest, self._root, self.remade
        if manifest is None or root is None:
            return False

        def change(work: Callable[[sqlite3.Connection], object]) -> None:
            # One that was made again meanwhile lacks the pieces before: it begins anew.
            self._guarded(lambda database: work(database) if self.remade == remade else None)

        catch_up(change, {name for (name,) in self.select("SELECT name FROM applied")}, manifest, root)
        if self.remade != remade or self.change((), has_caught_up):
            return False
        self.look()
        return True

    def close(self) -> None:
        """Release the database for another catalogue."""
        with self._lock:
            self._database.close()
            self._release()

    def add(self, *added: FileUpdate) -> int:
        """Add runs of files, and the files' current state: all or nothing; by how many bytes they have grown."""

        def put_in(database: sqlite3.Connection) -> int:
            with transaction(database):
                return sum(put(database, *note) for note in added)

        # No later scan finds the file of another node, which has to report it again: so that is an error.
        is_here = all(note.file.uri.startswith("file:") for note in added)
        more = self._guarded(put_in, 0 if is_here else _NOTHING)
        self.on_added(added)
        return more

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
        if found := [uri for (uri,) in self.select(begin, len(beginning), beginning)]:
            self._guarded(lambda database: forget(database, found))

    def look(self) -> None:
        """Scan the files again, which other programs may have changed; others use the catalogue meanwhile."""
        if (root := self._root) is None:
            return
        known, changed = {tuple(row) for row in self.select(ON_DISK)}, set[str]()
        try:
            for file in scan(root):
                row = file.session_id, file.uri, file.bytes, file.modified_ns
                if row in known:
                    known.remove(row)
                else:
                    changed.add(file.session_id)
        except OSError:  # the full scan below tries again, and logs the error
            self._guarded(self._look)
        else:
            if changed := changed | {session_id for session_id, *_ in known}:
                self._guarded(lambda database: self._look(database, changed))

    def change(self, session_ids: Collection[str], work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Change the database otherwise, and the `version` of these sessions with it."""

        def changed(database: sqlite3.Connection) -> _T:
            found = work(database)
            if session_ids:
                again = "UPDATE sums SET mark = random() WHERE session IN (SELECT value FROM json_each(?))"
                database.execute(again, (json.dumps([*session_ids]),))
            return found

        return self._guarded(changed)

    def select(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement selects."""
        return self._guarded(lambda database: database.execute(statement, values).fetchall())

    def _guarded(self, work: Callable[[sqlite3.Connection], _T], otherwise: _T = _NOTHING) -> _T:
        """Use the database, or one made again of the files; `otherwise` is the result if the disk refuses a write."""
        with self._lock:
            try:
                if time.monotonic() >= self._again:
                    self._look(self._database)
                return work(self._database)
            except sqlite3.Error as error:
                _check_fault(self._database, error)
                if (root := self._root) is None:
                    raise
                if code_of(error) in _REFUSED:
                    logger.error("the catalogue of %s is not up to date until it can be written: %s", root, error)
                    self._again = time.monotonic() + _AGAIN_S
                    if otherwise is _NOTHING:
                        raise StoreError(
                            f"The catalogue cannot be written ({error}): free space on the disk, or give the server's "
                            "user write permission."
                        ) from error
                    return otherwise
                logger.error("rebuilding the catalogue of %s from the files: %s", root, error)
            try:
                self._database.close()
                fill = partial(fill_new, self._manifest) if self._manifest else None
                self._database = opened(root, fill)
                self.remade += 1
                self._look(self._database)
                return work(self._database)
            except (OSError, sqlite3.Error) as error:
                raise explain(root, error) from error

    def _look(self, database: sqlite3.Connection, of: Collection[str] | None = None) -> None:
        """Read new and changed files; those that cannot be read are tried again later, and their entries stay."""
        assert self._root is not None
        again, self._again = math.inf if of is None else self._again, time.monotonic() + _AGAIN_S
        try:
            if refresh(database, self._root, self._manifest, of):
                self._again = again
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and code_of(error) not in _REFUSED:
                raise
            logger.exception("%s cannot be looked through: the catalogue is as it was, or empty", self._root)


class SharedCatalogue(Queries):
    """The catalogue as another process reads it while the store writes.

    Args:
        root: The store's directory.
        wait: Returns once a store has made the database.
        archives: Whether the store has a bucket.
    """

    def __init__(self, root: Path, wait: Callable[[], None], archives: bool = False) -> None:
        self.archives = archives
        self._root, self._wait, self._lock = root, wait, Lock()
        self._database: sqlite3.Connection | None = None
        self._inode = 0

    def select(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement selects."""
        with self._lock:
            try:
                path = self._root / NAME
                if self._database is None or not path.exists() or path.stat().st_ino != self._inode:  # it was replaced
                    self._database = None
                    self._wait()
                    self._database, self._inode = read_only(self._root), path.stat().st_ino
                return self._database.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                if self._database is not None:
                    _check_fault(self._database, error)
                self._database = None
                raise explain(self._root, error) from error


def _check_fault(database: sqlite3.Connection, error: sqlite3.Error) -> None:
    """Raise StoreError where not the database failed but the statement: then the plainest one works."""
    if code_of(error) in _FAULTS:
        return
    try:
        database.execute("SELECT 1 FROM files, runs LIMIT 1")
    except sqlite3.Error:
        return
    raise StoreError(f"The catalogue cannot run this query: {error}.") from error
