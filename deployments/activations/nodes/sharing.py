"""Who takes a replica's runs: a writer on its own node where that shares the store's directory, else the store."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.activations.files.disk import NEW
from deployments.clusters import HEAD, NAMESPACE, detached, detached_names

MARKER = f"{NEW}shared-"  # in a store's directory, whose next start removes those that killed processes left
_SEEN_S = 5.0  # for which a file of another node is waited for: NFS keeps listings for some seconds
_READY_S = 60.0  # that a replica waits for its node's writer
_WRITER = "activation writer of "

logger = logging.getLogger(__name__)


def connect_writer(root: str, store: Any) -> Any:
    """The actor that takes this node's runs.

    The store itself on its own node, and for a node that does not share its directory: batches then go to the store
    through Ray's object store.
    """
    own = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == own)  # type: ignore[no-untyped-call]
    if HEAD in node["Resources"] or not shares(Path(root), store, node["NodeManagerAddress"]):
        return store
    from deployments.activations.nodes.node_writer import NodeWriter  # needs Arrow, which Serve's controller does not

    on_it = NodeAffinitySchedulingStrategy(own, soft=False)
    made = detached(NodeWriter, f"{_WRITER}{root} on {own}", max_concurrency=10_000, scheduling_strategy=on_it)
    writer = made.remote(root, store)
    try:
        ray.get(writer.ready.remote(), timeout=_READY_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        logger.warning("the writer of this node does not start (%s): its runs go through the head", error)
        return store
    return writer


def shares(root: Path, store: Any, address: str) -> bool:
    """Whether this node shares the store's directory: each reads a marker of the other, and locks hold on both."""
    theirs: str = ray.get(store.marker.remote())
    if sees(root, theirs) and _is_locked(root / f"{MARKER}{theirs}"):
        try:
            with placed_marker(root) as mine:
                return bool(ray.get(store.accept.remote(address, mine)))
        except OSError as error:
            logger.warning("this node cannot write to %s: %s", root, error)
    ray.get(store.accept.remote(address, ""))
    return False


@contextlib.contextmanager
def placed_marker(root: Path) -> Iterator[str]:
    """While open, a marker lies in a directory, locked; gives its random name. OSError if it cannot be written."""
    name = secrets.token_hex(16)
    path = root / f"{MARKER}{name}"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file, name.encode())
        os.fsync(file)
        yield name
    finally:
        os.close(file)
        path.unlink(missing_ok=True)


def sees(root: Path, name: str) -> bool:
    """Whether a marker of another node lies in a directory, perhaps after a moment."""
    until = time.monotonic() + _SEEN_S
    while name and root.is_dir():
        with contextlib.suppress(OSError):
            os.listdir(root)  # NFS then asks the server again
            if (root / f"{MARKER}{name}").read_text() == name:
                return True
        if time.monotonic() >= until:
            break
        time.sleep(0.1)
    return False


def _is_locked(path: Path) -> bool:
    """Whether another node's lock holds here: else the store would take files that are being written for leftovers."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        logger.warning("locks on %s fail: %s", path.parent, error)
        return False
    logger.warning("locks on %s hold on each node alone: mount it with locks that hold on all nodes", path.parent)
    return False


def node_writers(root: str) -> list[Any]:
    """The handles of the nodes' writers of a store; none where this process has joined no cluster."""
    found, prefix = [], f"{_WRITER}{root} on "
    for node in detached_names(prefix) if ray.is_initialized() else []:
        with contextlib.suppress(ValueError):  # it has ended meanwhile, and its node with it
            found.append(ray.get_actor(prefix + node, namespace=NAMESPACE))
    return found
