"""What a store's catalogue says, read in another process beside the one that keeps it."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any

from deployments.activations.catalogue.catalogue import Catalogue, is_at_fault
from deployments.activations.catalogue.database import keeper_of, read_only
from deployments.activations.catalogue.entries import ENTRIES, entries_of
from deployments.activations.facts import Entry, StoreError

Ask = Callable[[str, Sequence[Any]], tuple[str, list[Any]]]
"""Asks the process that keeps the catalogue, as `Catalogue.query`."""

logger = logging.getLogger(__name__)


class SharedCatalogue(Catalogue):
    """The reading half of a catalogue: out of its database, or from its process where the database is not kept.

    A commit is seen as soon as it is made. The writer waits for no reader: the database has a write-ahead log.

    Args:
        root: The store's.
        ask: Asks the process that keeps it.
        archives: As of `Catalogue`.
    """

    def __init__(self, root: Path, ask: Ask, archives: bool = False) -> None:
        super().__init__()
        self.archives = archives
        self._kept_in = root
        self._ask = ask
        self._alone = Lock()

    def _all(self, statement: str, *values: Any) -> list[Any]:
        with self._alone:
            if self.keeper and keeper_of(self._kept_in) == self.keeper:
                try:
                    return self._database.execute(statement, values).fetchall()
                except sqlite3.Error as error:
                    if not is_at_fault(self._database, error):
                        raise StoreError(f"The catalogue cannot look for that: {error}.") from error
                    logger.exception("the catalogue of %s cannot be read: the store is asked", self._kept_in)
                    self.keeper = ""
        keeper, rows = self._ask(statement, values)
        with self._alone:
            if keeper and keeper != self.keeper:
                self._open(keeper)
        return rows

    def _open(self, keeper: str) -> None:
        try:
            database = read_only(self._kept_in)
        except (OSError, sqlite3.Error):
            logger.exception("the catalogue of %s cannot be read: the store is asked", self._kept_in)
            return
        self._hold(database, database.close)
        self.keeper = keeper


def known(root: Path, runs: Collection[str]) -> list[Entry]:
    """Those of the runs that the database of a store's catalogue knows, wherever the store is; no file is looked at."""
    named = f"{ENTRIES} WHERE runs.run_id IN (SELECT value FROM json_each(?))"
    try:
        with closing(read_only(root)) as database:
            return entries_of(database.execute(named, (json.dumps([*runs]),)).fetchall())
    except (OSError, sqlite3.Error) as error:
        logger.info("the catalogue of %s cannot be read (%s): its files are", root, error)
        return []
