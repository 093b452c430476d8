"""Connections to SQLite databases, and transactions on them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path


def connected(path: Path | str) -> sqlite3.Connection:
    """A connection that any thread may use, one at a time, with transactions that are begun by hand."""
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, uri=True)
    database.execute("PRAGMA cache_size = -65536")  # KiB
    database.execute("PRAGMA temp_store = MEMORY")
    return database


def code_of(error: sqlite3.Error) -> int:
    """SQLite's code of an error, without the detail of extended codes; 0 where it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All that is done within, or nothing; within another, that one's."""
    if database.in_transaction:
        yield
        return
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:  # any error: roll back, then re-raise
        if database.in_transaction:  # some errors end it by themselves
            database.execute("ROLLBACK")
        raise
