"""The nodes that keep runs on disks of their own, as the store's node knows them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from urllib.parse import quote, unquote

import ray

SCHEME = "node://"  # of segments that lie on another node's disk: node://<key>/<session>/<segment>
_NAME = ".nodes.sqlite3"  # no session id begins with '.'
_ALIVE_S = 1.0  # for which it is believed which nodes are alive
# A node whose disk was lost comes back with another key, and `lost` is then said of the former one.
_TABLES = """
CREATE TABLE IF NOT EXISTS nodes (
    key TEXT PRIMARY KEY, name TEXT NOT NULL, root TEXT NOT NULL, ray_id TEXT NOT NULL, lost INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE IF NOT EXISTS deletions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, node TEXT NOT NULL, session TEXT NOT NULL, fence TEXT, last REAL
);
"""


class Node(NamedTuple):
    """A node with a directory of its own.

    Attributes:
        key: What tells its directory from all others; it is made with the directory.
        name: The node's address in the cluster.
        root: The directory there.
        ray_id: The node's id in Ray, another one each time that it joins the cluster.
        lost: Whether the node came back without this directory.
    """

    key: str
    name: str
    root: str
    ray_id: str
    lost: bool = False


class Deletion(NamedTuple):
    """A session that a node has yet to delete.

    Attributes:
        id: Counts the deletions.
        session_id: The session.
        fence: The fence of its owner's record: runs that show it are refused from now on.
        last: When the last run was made that the store knew of, in Unix seconds: where there is a later one on the
            node, the session stays. None where somebody asked for the deletion.
    """

    id: int
    session_id: str
    fence: str | None
    last: float | None


class Nodes:
    """What is known of nodes, durable when it answers. Safe to use from several threads.

    Args:
        root: The store's directory.
        read_only: For a process beside the one that keeps it.
    """

    def __init__(self, root: Path, read_only: bool = False) -> None:
        self._path = root / _NAME
        self._read_only = read_only
        self._lock = Lock()
        self._database: sqlite3.Connection | None = None
        self._alive: tuple[float, frozenset[str]] = (0.0, frozenset())

    def all(self) -> dict[str, Node]:
        """The nodes by their keys.

        Raises:
            OSError: The disk refuses.
        """
        found = self._ask("SELECT key, name, root, ray_id, lost FROM nodes")
        return {key: Node(key, name, root, ray_id, bool(lost)) for key, name, root, ray_id, lost in found}

    def join(self, node: Node) -> None:
        """A node is there, perhaps again.

        Raises:
            OSError: The disk refuses.
        """
        former = [one for one in self.all().values() if one.name == node.name and one.key != node.key]
        lost = [(one.key,) for one in former if not self.is_alive(one)]  # its address has another directory now
        self._change(
            *[("UPDATE nodes SET lost = 1 WHERE key = ?", key) for key in lost],
            *[("DELETE FROM deletions WHERE node = ?", key) for key in lost],
            ("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, 0)", node[:4]),
        )

    def begin_deletion(self, session_id: str, fence: str | None, last: float | None) -> None:
        """Have all nodes delete a session; those that are away do when they come back.

        Raises:
            OSError: The disk refuses.
        """
        each = "INSERT INTO deletions (node, session, fence, last) SELECT key, ?, ?, ? FROM nodes WHERE NOT lost"
        self._change((each, (session_id, fence, last)))

    def deletions(self, key: str) -> list[Deletion]:
        """What a node has yet to delete, in order.

        Raises:
            OSError: The disk refuses.
        """
        found = "SELECT id, session, fence, last FROM deletions WHERE node = ? ORDER BY id"
        return [Deletion(*row) for row in self._ask(found, key)]

    def waiting(self, session_id: str) -> dict[str, list[Deletion]]:
        """By node, the deletions of a session that are not done."""
        found = "SELECT node, id, session, fence, last FROM deletions WHERE session = ? ORDER BY id"
        waiting: dict[str, list[Deletion]] = {}
        for node, *row in self._ask(found, session_id):
            waiting.setdefault(node, []).append(Deletion(*row))
        return waiting

    def end_deletions(self, key: str, done: Collection[int]) -> None:
        """A node has deleted sessions.

        Raises:
            OSError: The disk refuses.
        """
        if done:
            gone = "DELETE FROM deletions WHERE node = ? AND id = ?"
            self._change(*[(gone, (key, number)) for number in done])

    def is_alive(self, node: Node) -> bool:
        """Whether a node is in the cluster, as it was within the last second."""
        if node.lost:
            return False
        until, alive = self._alive
        if time.monotonic() >= until:
            alive = frozenset(found["NodeID"] for found in ray.nodes() if found["Alive"])  # type: ignore[no-untyped-call]
            self._alive = time.monotonic() + _ALIVE_S, alive
        return node.ray_id in alive

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database = None

    def _ask(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        return self._done(lambda database: database.execute(statement, values).fetchall())

    def _change(self, *statements: tuple[str, tuple[object, ...]]) -> None:
        def change(database: sqlite3.Connection) -> list[tuple]:  # type: ignore[type-arg]
            with database:  # all or nothing
                for statement, values in statements:
                    database.execute(statement, values)
            return []

        self._done(change)

    def _done(self, work: Callable[[sqlite3.Connection], list[tuple]]) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock:
            try:
                if self._database is None:
                    if self._read_only and not self._path.exists():
                        return []  # no node has joined yet
                    self._database = self._opened()
                return work(self._database)
            except sqlite3.Error as error:
                raise OSError(f"{self._path}: {error}") from error

    def _opened(self) -> sqlite3.Connection:
        address = f"{self._path.as_uri()}{'?mode=ro' if self._read_only else ''}"
        database = sqlite3.connect(address, uri=True, check_same_thread=False)
        if not self._read_only:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            for statement in _TABLES.split("\n\n"):
                database.execute(statement)
            database.commit()
        return database


def uri_of(key: str, name: str) -> str:
    """The URI of a node's segment.

    Args:
        key: The node's.
        name: `<session>/<segment>`, quoted as in URIs.
    """
    return f"{SCHEME}{quote(key, safe='')}/{name}"


def node_of(uri: str) -> str | None:
    """The key of the node on whose disk a segment lies; None of one of the store's own disk, or of a bucket's."""
    return unquote(uri[len(SCHEME) :].partition("/")[0]) if uri.startswith(SCHEME) else None


def described(run: dict, nodes: Nodes) -> dict:  # type: ignore[type-arg]
    """A run as the catalogue lists it, with the files' place on their node, its name, and whether it can be read now.

    A run of the store's own disk, or of a bucket, stays as it is.

    Raises:
        OSError: The disk refuses.
    """
    uri = next((point["uri"] for point in run["points"].values()), "")
    if (key := node_of(uri)) is None:
        return run
    node = nodes.all().get(key) or Node(key, "unknown", "", "", lost=True)
    place = Path(node.root or "/").as_uri() + uri[len(uri_of(key, "")) - 1 :]
    points = {name: {**point, "uri": place} for name, point in run["points"].items()}
    readable = nodes.is_alive(node) or bool(run.get("archived"))
    return {**run, "points": points, "node": node.name, "available": readable} | ({"lost": True} if node.lost else {})
