"""Segments on other nodes' disks: uploaded, removed and read there."""

from __future__ import annotations

import errno
import functools
import io
import os
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.activations.facts import name_of, names_a_session
from deployments.activations.files.places import File, Place
from deployments.activations.nodes.cluster import node_writers, writer_on
from deployments.activations.state.nodes import SCHEME, Node, Nodes, node_of
from deployments.clusters import NAMESPACE, detached

_UPLOAD_S = 3600.0  # that one segment's upload may take
_ANSWER_S = 30.0  # that anything else may
_FLUSH_S = 2.0  # that a node may take to report its latest runs
_PIECE = 8 << 20  # bytes that are read by one call


class NodeAwayError(OSError):
    """The node whose disk has a segment does not answer. With `lost`, the segment is gone for good."""

    def __init__(self, message: str, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


class SegmentReader:
    """Reads a node's `<session>/<segment>` for others, in a process of its own; OSError where the disk refuses."""

    def __init__(self, root: str) -> None:
        self._root = Path(root).resolve()

    def size(self, name: str) -> int | None:
        """The bytes of a segment; None where there is none."""
        try:
            return self._path(name).stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            return None

    def read(self, name: str, first: int, size: int) -> bytes:
        """Up to `size` bytes, and no more than `_PIECE`, of a segment from byte `first`."""
        file = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return os.pread(file, min(size, _PIECE), first)
        finally:
            os.close(file)

    def _path(self, name: str) -> Path:
        session_id, _, segment = name.partition("/")
        if not (names_a_session(session_id) and segment.endswith(".arrow") and "/" not in segment):
            raise FileNotFoundError(f"{name!r} names no segment")
        return self._root / session_id / segment


def serve_segments(root: str, node: str) -> Any:
    """The reader of a node's own directory, started by the first call; `node` is the node's id in Ray."""
    on_it = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"max_task_retries": 1, "max_concurrency": 8, "scheduling_strategy": on_it}
    return detached(SegmentReader, _named(root, node), **options).remote(root)


def reader_on(root: str, node: str) -> Any:
    """The reader of a node's directory; raises ValueError if there is none."""
    return ray.get_actor(_named(root, node), namespace=NAMESPACE)


class NodePlace(Place):
    """All nodes' own directories, read by ranges, uploaded and removed; files of nodes that are away from `bucket`."""

    def __init__(self, root: str, nodes: Nodes, bucket: Place | None = None) -> None:
        super().__init__(None, "", SCHEME.removesuffix("/"), restores=False)
        self._root, self._nodes, self._bucket = root, nodes, bucket
        self._readers: dict[str, Any] = {}  # by their nodes' ids in Ray

    def file(self, name: str) -> File:
        """A node's segment, `<key>/<session>/<segment>`, or its copy in the bucket; NodeAwayError if neither."""
        uri = f"{self.uri}/{name}"
        file = NodeFile(self, uri)
        if self._bucket is None:
            return file
        copy = self._bucket.file(name_of(uri))
        try:
            return file if file.exists() or not copy.exists() else copy
        except NodeAwayError:
            if copy.exists():
                return copy
            raise

    def ask(self, uri: str, method: str, *args: int) -> Any:
        """What the `SegmentReader` of a segment's node answers.

        NodeAwayError if the node is away or does not answer in time, OSError if its disk refuses.
        """
        return self._ask(uri, method, *args, of=self._reader)

    def _ask(
        self, uri: str, method: str, *args: int, of: Callable[[str, str], Any], within_s: float = _ANSWER_S
    ) -> Any:
        node = place_of_node(self._nodes, uri)
        try:
            actor = of(self._root, node.ray_id)
            return getattr(actor, method).remote(name_of(uri), *args).future().result(timeout=within_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OSError):
                raise error.cause from error
            raise OSError(f"node {node.name}: {error.cause}") from error
        except (ray.exceptions.RayError, ValueError, TimeoutError) as error:
            raise NodeAwayError(f"node {node.name} does not answer: {error}") from error

    def _reader(self, root: str, node: str) -> Any:
        if node not in self._readers:
            self._readers[node] = reader_on(root, node)
        return self._readers[node]

    def below(self, name: str) -> Place:
        """It: no directory of a node is listed by this."""
        return self

    def known(self) -> Iterable[str]:
        """The keys of nodes whose disk is not lost."""
        return [key for key, node in self._nodes.all().items() if not node.lost]

    def is_alive(self, node: str) -> bool:
        """Whether a node, by its key, can be asked."""
        found = self._nodes.all().get(node)
        return found is not None and self._nodes.is_alive(found)

    def upload(self, uri: str, size: int) -> None:
        """Upload a segment from its node; raises as `ask`."""
        self._ask(uri, "upload", size, of=writer_on, within_s=_UPLOAD_S)

    def remove(self, uri: str) -> None:
        """Remove a segment from its node's disk; raises as `ask`."""
        self._ask(uri, "remove", of=writer_on)

    def flush(self) -> bool:
        """Make the nodes' writers that answer soon report their latest runs; whether there are any such writers."""
        asked = [writer.flush.remote().future() for writer in node_writers(self._root)]
        wait(asked, timeout=_FLUSH_S)
        return bool(asked)


class NodeFile(File):
    """A segment on another node's disk, of which ranges are read there."""

    def __init__(self, folder: NodePlace, uri: str) -> None:
        super().__init__(None, uri.removeprefix(SCHEME), uri, folder)
        self._ask = functools.partial(folder.ask, uri)

    def exists(self) -> bool:
        """Whether it is there."""
        return self._ask("size") is not None

    def input(self) -> Any:
        """Arrow's random access file of it."""
        if (size := self._ask("size")) is None:
            raise FileNotFoundError(errno.ENOENT, "somebody removed the file", self.uri)
        return pa.PythonFile(_Ranges(self._ask, size), mode="r")


class _Ranges(io.RawIOBase):
    """A file of so many bytes that is read by ranges, `ask("read", first, size)`, as Python's files are."""

    def __init__(self, ask: Callable[..., Any], size: int) -> None:
        self._ask, self._size, self._at = ask, size, 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        end = self._size if count is None or count < 0 else min(self._at + count, self._size)
        pieces = list[bytes]()
        while self._at < end and (piece := self._ask("read", self._at, min(end - self._at, _PIECE))):
            pieces.append(piece)
            self._at += len(piece)
        return b"".join(pieces)


def place_of_node(nodes: Nodes, uri: str) -> Node:
    """The node on whose disk a segment lies; NodeAwayError if it is not in the cluster or lost its disk."""
    node = nodes.all().get(node_of(uri) or "")
    if node is None:
        raise NodeAwayError("the run lies on a node that is not known any more", lost=True)
    if node.lost:
        raise NodeAwayError(f"the run was on the disk of node {node.name}, which is lost", lost=True)
    if not nodes.is_alive(node):
        raise NodeAwayError(f"the run lies on node {node.name}, which is away: try again when it is back")
    return node


def _named(root: str, node: str) -> str:
    return f"activation segments of {root} on {node}"
