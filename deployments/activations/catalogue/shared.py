"""The catalogue of a store as other processes read it, beside the one that keeps it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from deployments.activations.catalogue.catalogue import is_at_fault
from deployments.activations.catalogue.database import NAME, read_only
from deployments.activations.catalogue.queries import Queries
from deployments.activations.facts import StoreError
from deployments.activations.failures import explain


class SharedCatalogue(Queries):
    """Reads the database of a store's directory.

    A commit is seen at once. The database has a write-ahead log: its writer waits for no reader.

    Args:
        root: The store's directory.
        wait: Returns once the process that keeps the catalogue has started; called before the database is opened.
        archives: As the attribute.
    """

    def __init__(self, root: Path, wait: Callable[[], None], archives: bool = False) -> None:
        self.archives = archives
        self._root = root
        self._wait = wait
        self._lock = Lock()
        self._inode = 0
        self._database: sqlite3.Connection | None = None

    def _all(self, statement: str, *values: Any) -> list[Any]:
        with self._lock:
            try:
                database = self._opened()
                return database.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                if self._database is not None and not is_at_fault(self._database, error):
                    raise StoreError(f"The catalogue cannot look for that: {error}.") from error
                self._database = None
                raise explain(self._root, error) from error

    def _opened(self) -> sqlite3.Connection:
        """The database, which the store replaces where it is damaged."""
        path = self._root / NAME
        if self._database is None or not path.exists() or path.stat().st_ino != self._inode:
            self._database = None
            self._wait()
            self._database, self._inode = read_only(self._root), path.stat().st_ino
        return self._database
