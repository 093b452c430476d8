"""Segments that lie on other nodes' disks: uploaded, removed and read where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.activations.facts import names_a_session
from deployments.activations.nodes import Node, Nodes, node_of
from deployments.activations.taking import writer_on
from deployments.clusters import NAMESPACE

_UPLOAD_S = 3600.0  # that one segment's upload may take
_ANSWER_S = 30.0  # that anything else may


class NodeAwayError(OSError):
    """The node on whose disk a segment lies cannot be asked; names it."""


class NodeSegments:
    """What the store has other nodes do with their segments, as `archive.Elsewhere`.

    Args:
        root: The store's directory, as it was asked for.
        nodes: The nodes.
    """

    def __init__(self, root: str, nodes: Nodes) -> None:
        self._root = root
        self._nodes = nodes

    def is_alive(self, node: str) -> bool:
        """Whether a node can be asked."""
        found = self._nodes.all().get(node)
        return found is not None and self._nodes.is_alive(found)

    def upload(self, uri: str, size: int) -> None:
        """Upload a segment from its node."""
        self._ask(uri, lambda writer: writer.upload.remote(_name_of(uri), size), _UPLOAD_S)

    def remove(self, uri: str) -> None:
        """Remove a segment from its node's disk."""
        self._ask(uri, lambda writer: writer.remove.remote(_name_of(uri)), _ANSWER_S)

    def seal(self, uri: str) -> None:
        """End a segment that no run is being written to, and all others of its session on its node."""
        self._ask(uri, lambda writer: writer.seal.remote(_name_of(uri).partition("/")[0]), _ANSWER_S)

    def _ask(self, uri: str, call: Callable[[Any], Any], seconds: float) -> None:
        node = place_of_node(self._nodes, uri)
        try:
            call(writer_on(self._root, node.ray_id)).future().result(timeout=seconds)
        except ray.exceptions.RayTaskError as error:
            raise OSError(f"node {node.name}: {error.cause}") from error
        except (ray.exceptions.RayError, ValueError, TimeoutError) as error:
            raise NodeAwayError(f"node {node.name} does not answer: {error}") from error


class SegmentReader:
    """Reads a node's own directory for others, in a process of its own: a damaged disk ends no writer.

    Args:
        root: The node's directory.
    """

    def __init__(self, root: str) -> None:
        self._root = Path(root).resolve()

    def size(self, name: str) -> int | None:
        """The bytes of a segment; None where there is none.

        Args:
            name: `<session>/<segment>`.

        Raises:
            OSError: The disk refuses.
        """
        try:
            return self._path(name).stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            return None

    def read(self, name: str, first: int, size: int) -> bytes:
        """Up to `size` bytes of a segment from byte `first`.

        Raises:
            OSError: The disk refuses.
        """
        file = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return os.pread(file, size, first)
        finally:
            os.close(file)

    def _path(self, name: str) -> Path:
        session_id, _, segment = name.partition("/")
        if not (names_a_session(session_id) and segment.endswith(".arrow") and "/" not in segment):
            raise FileNotFoundError(f"{name!r} names no segment")
        return self._root / session_id / segment


def serve_segments(root: str, node: str) -> Any:
    """The reader of a node's own directory, made by whoever asks first.

    Args:
        root: The store's directory, as it was asked for, and the node's.
        node: The node's id in Ray.
    """
    return (
        ray.remote(SegmentReader)
        .options(
            name=_named(root, node),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=1,
            max_concurrency=8,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(root)
    )


class RemoteSegment:
    """Bytes of a segment on another node's disk, which are fetched when they are asked for.

    Args:
        root: The store's directory, as it was asked for.
        node: The node.
        name: `<session>/<segment>`.
    """

    def __init__(self, root: str, node: Node, name: str) -> None:
        self._root = root
        self._node = node
        self._name = name

    def size(self) -> int | None:
        """Its bytes; None where it is gone.

        Raises:
            NodeAwayError: The node does not answer.
            OSError: Its disk refuses.
        """
        found: int | None = self._asked("size", self._name)
        return found

    def read(self, first: int, size: int) -> bytes:
        """Up to `size` bytes from byte `first`.

        Raises:
            NodeAwayError: The node does not answer.
            OSError: Its disk refuses.
        """
        data: bytes = self._asked("read", self._name, first, size)
        return data

    def _asked(self, method: str, *args: Any) -> Any:
        try:
            reader = ray.get_actor(_named(self._root, self._node.ray_id), namespace=NAMESPACE)
            return getattr(reader, method).remote(*args).future().result(timeout=_ANSWER_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OSError):
                raise error.cause from error
            raise
        except (ray.exceptions.RayError, ValueError, TimeoutError) as error:
            raise NodeAwayError(f"node {self._node.name} does not answer: {error}") from error


def place_of_node(nodes: Nodes, uri: str) -> Node:
    """The node on whose disk a segment lies.

    Raises:
        NodeAwayError: It is not in the cluster, or has lost its disk.
    """
    key = node_of(uri)
    node = nodes.all().get(key or "")
    if node is None or not nodes.is_alive(node):
        name = node.name if node else "that has left the cluster"
        lost = "came back with an empty disk, and the run is lost" if node and node.lost else "is away; try again later"
        raise NodeAwayError(f"the run lies on node {name}, which {lost}")
    return node


def _name_of(uri: str) -> str:
    return "/".join(uri.rsplit("/", 2)[-2:])


def _named(root: str, node: str) -> str:
    return f"activation segments of {root} on {node}"
