"""The catalogue of a store as other processes read it, beside the one that keeps it."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any

from deployments.activations.catalogue.catalogue import is_at_fault
from deployments.activations.catalogue.database import keeper_of, read_only
from deployments.activations.catalogue.entries import ENTRIES, entries_of
from deployments.activations.catalogue.queries import Queries
from deployments.activations.facts import Entry, StoreError

Ask = Callable[[str, Sequence[Any]], tuple[str, list[Any]]]
"""Asks the process that keeps the catalogue, as `Catalogue.query`."""

logger = logging.getLogger(__name__)


class SharedCatalogue(Queries):
    """Reads the database, or asks the process that keeps the catalogue where its database is in memory.

    A commit is seen at once. The database has a write-ahead log: its writer waits for no reader.

    Args:
        root: The store's directory.
        ask: Asks the process that keeps the catalogue.
        archives: As the attribute.
    """

    def __init__(self, root: Path, ask: Ask, archives: bool = False) -> None:
        self.archives = archives
        self._root = root
        self._ask = ask
        self._lock = Lock()
        self._keeper = ""
        self._database: sqlite3.Connection | None = None  # as `_keeper` keeps it

    def _all(self, statement: str, *values: Any) -> list[Any]:
        with self._lock:
            if self._database is not None and keeper_of(self._root) == self._keeper:
                try:
                    return self._database.execute(statement, values).fetchall()
                except sqlite3.Error as error:
                    if not is_at_fault(self._database, error):
                        raise StoreError(f"The catalogue cannot look for that: {error}.") from error
                    logger.exception("the catalogue of %s cannot be read: the store is asked", self._root)
                    self._close()
        keeper, rows = self._ask(statement, values)
        with self._lock:
            if keeper and keeper != self._keeper:
                self._open(keeper)
        return rows

    def _open(self, keeper: str) -> None:
        self._close()
        try:
            self._database, self._keeper = read_only(self._root), keeper
        except (OSError, sqlite3.Error):
            logger.exception("the catalogue of %s cannot be read: the store is asked", self._root)

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database, self._keeper = None, ""


def known(root: Path, runs: Collection[str]) -> list[Entry]:
    """Those of the runs that are in the database of a directory's catalogue; no file is opened."""
    named = f"{ENTRIES} WHERE runs.run_id IN (SELECT value FROM json_each(?))"
    try:
        with closing(read_only(root)) as database:
            return entries_of(database.execute(named, (json.dumps([*runs]),)).fetchall())
    except (OSError, sqlite3.Error) as error:
        logger.info("the catalogue of %s cannot be read (%s): its files are", root, error)
        return []
