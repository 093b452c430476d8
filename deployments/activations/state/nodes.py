"""The nodes that keep runs on their own disks, as recorded by the store."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import ray

from deployments.activations.state.state import State

SCHEME = "node://"  # of segments that lie on another node's disk: node://<key>/<session>/<segment>
_ALIVE_S = 1.0  # for which it is believed which nodes are alive
_LOST_S = 7 * 86400.0  # that a node may be away before its disk counts as lost


class Node(NamedTuple):
    """A node with a directory of its own, `root`, by a `key` that is made with the directory.

    `ray_id` is another one each time that it joins the cluster. It is `lost` if it came back without the directory, or
    is away for a week; if it is there again with the directory, it is no more.
    """

    key: str
    name: str
    root: str
    ray_id: str
    lost: bool = False


class Deletion(NamedTuple):
    """A session that a node has yet to delete, unless it has a run later than `last` (Unix seconds; None for never)."""

    id: int
    session_id: str
    fence: str | None
    last: float | None


class Nodes(State):
    """The table of nodes and their pending deletions. Each change is durable when the call returns."""

    def __init__(self, root: Path, read_only: bool = False) -> None:
        super().__init__(root, read_only)
        self._alive: tuple[float, frozenset[str]] = (0.0, frozenset())
        self._away: dict[str, float] = {}  # since when, as this process saw it: after its start a node may yet come

    def all(self) -> dict[str, Node]:
        """The nodes by their keys."""
        found = self.rows("SELECT key, name, root, ray_id, lost FROM nodes")
        return {key: Node(key, name, root, ray_id, bool(lost)) for key, name, root, ray_id, lost in found}

    def join(self, node: Node) -> None:
        """A node is there, perhaps again."""
        self.write("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, 0)", [node[:4]])
        self.mark_lost()

    def mark_lost(self, now: float | None = None) -> None:
        """Record which nodes have lost their disk by a time in Unix seconds: see `Node`."""
        now, nodes = time.time() if now is None else now, self.all().values()
        there = {one.name for one in nodes if self.is_alive(one)}
        self._away = {one.key: self._away.get(one.key, now) for one in nodes if not self.is_alive(one)}
        late = {key for key, since in self._away.items() if since <= now - _LOST_S}
        away = [one for one in nodes if one.key in self._away and not one.lost]
        if lost := [(one.key,) for one in away if one.name in there or one.key in late]:
            self.write("UPDATE nodes SET lost = 1 WHERE key = ?", lost)

    def begin_deletion(
        self, session_id: str, fence: str | None, last: float | None, holding: Collection[str | None]
    ) -> None:
        """Let nodes delete a session: those in `holding`, by key, and all that are not lost.

        The latter may hold runs that they have not reported. Nodes that are away delete when they come back.
        """
        nodes = [one.key for one in self.all().values() if one.key in holding or not one.lost]
        each = "INSERT INTO deletions (node, session, fence, last) VALUES (?, ?, ?, ?)"
        self.write(each, [(key, session_id, fence, last) for key in nodes])

    def deletions(self, key: str) -> list[Deletion]:
        """What a node has yet to delete, in order."""
        found = "SELECT id, session, fence, last FROM deletions WHERE node = ? ORDER BY id"
        return [Deletion(*row) for row in self.rows(found, key)]

    def waiting(self, session_id: str) -> set[str]:
        """The keys of the nodes that have yet to delete a session."""
        return {node for (node,) in self.rows("SELECT node FROM deletions WHERE session = ?", session_id)}

    def end_deletions(self, key: str, done: Collection[int]) -> None:
        """A node has deleted sessions."""
        self.write("DELETE FROM deletions WHERE node = ? AND id = ?", [(key, number) for number in done])

    def is_alive(self, node: Node) -> bool:
        """Whether a node is in the cluster, as it was within the last second."""
        if node.lost:
            return False
        until, alive = self._alive
        if time.monotonic() >= until:
            found = ray.nodes()  # type: ignore[no-untyped-call]
            alive = frozenset(one["NodeID"] for one in found if one["Alive"])
            self._alive = time.monotonic() + _ALIVE_S, alive
        return node.ray_id in alive


def uri_of(key: str, name: str) -> str:
    """The URI of a segment of the node with this key, by its name `<session>/<segment>`, quoted as in URIs."""
    return f"{SCHEME}{quote(key, safe='')}/{name}"


def node_of(uri: str) -> str | None:
    """The key of the node on whose disk a segment lies; None of one of the store's own disk, or of a bucket's."""
    return unquote(uri[len(SCHEME) :].partition("/")[0]) if uri.startswith(SCHEME) else None


def described(listed: list[dict[str, Any]], nodes: Nodes) -> list[dict[str, Any]]:
    """Runs or files as the catalogue lists them, with their place on their node, its name, and if they can be read."""
    known, said = nodes.all(), list[dict[str, Any]]()
    for one in listed:
        uri = one["uri"] if "uri" in one else next((point["uri"] for point in one["points"].values()), "")
        if (key := node_of(uri)) is not None:  # neither of the store's own disk, nor of a bucket
            node = known.get(key) or Node(key, "unknown", "/", "", lost=True)
            place = {"uri": f"{Path(node.root).as_uri()}/{uri.removeprefix(uri_of(key, ''))}"}
            one = {**one, "node": node.name}
            if "uri" in one:
                one |= place
            else:
                one["points"] = {name: point | place for name, point in one["points"].items()}
                one["available"] = nodes.is_alive(node) or bool(one.get("archived"))
                one |= {"lost": True} if node.lost and not one["available"] else {}
        said.append(one)
    return said
