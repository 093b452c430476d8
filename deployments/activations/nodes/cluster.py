"""The cluster's nodes: their writers, which take a replica's runs, and which nodes are about to be released."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import psutil
import ray
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.activations.nodes.receiving import StartingError
from deployments.clusters import HEAD, NAMESPACE, detached

_MONITORS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
_STATUS = b"__autoscaling_status"  # ray._private.ray_constants.DEBUG_AUTOSCALING_STATUS
_READY_S = 60.0  # that a replica waits for its node's writer

logger = logging.getLogger(__name__)


def writer_on(root: str, node: str) -> Any:
    """The handle of the writer of a node, by its id in Ray; ValueError if there is none."""
    return ray.get_actor(f"{writer_name(root)} {node}", namespace=NAMESPACE)


def actors(prefix: str) -> list[str]:
    """The names of the cluster's actors that begin so."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in found if one["namespace"] == NAMESPACE and one["name"].startswith(prefix)]


def node_writers(root: str) -> list[Any]:
    """The handles of all nodes' writers of a store."""
    found = []
    for name in actors(writer_name(root)):
        with contextlib.suppress(ValueError):  # it has ended meanwhile, and its node with it
            found.append(ray.get_actor(name, namespace=NAMESPACE))
    return found


def writer_name(root: str) -> str:
    """How the names of a store's writers begin: the id of the node in Ray follows."""
    return f"activation writer of {root} on"


def releases_nodes() -> bool:
    """Whether Ray's autoscaler can release nodes of this cluster; for a process on the head node.

    Ray's monitor runs on each head node, and scales only if it has a configuration. On Kubernetes it shows by its
    status.
    """
    monitors = list[list[str]]()
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue  # it has ended, or is another user's
        if any(word.endswith(_MONITORS) for word in command):
            monitors.append(command)
    if monitors:
        return any(word.startswith("--autoscaling-config") for command in monitors for word in command)
    return bool(_internal_kv_get(_STATUS))


def is_released() -> bool:
    """Whether this node is about to be released."""
    return ray.get_runtime_context().get_node_id() in ray._private.state.state.get_draining_nodes()


def connect_writer(root: str, store: Any, archive: str | None = None) -> Any:
    """Who takes this node's runs: the store on its own node, elsewhere a writer of the node.

    While the store does not answer, each run fails with the reason. StoreError if the node cannot keep runs.
    """
    own = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == own)  # type: ignore[no-untyped-call]
    if HEAD in node["Resources"]:  # where the store is
        return store
    writer = _open_writer(root, store, archive, own, node["NodeManagerAddress"])
    try:
        ray.get(writer.ready.remote(), timeout=_READY_S)
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, StartingError):
            raise error.cause from error
        logger.warning("runs of this node fail for now: %s", error.cause)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        logger.warning("runs of this node fail until its writer answers: %s", error)
    return writer


def open_returned(root: str, store: Any, archive: str | None, away: Mapping[str, str]) -> None:
    """Open the directories of nodes that have come back, given the ids in Ray that they had by their addresses."""
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        address, own = node["NodeManagerAddress"], node["NodeID"]
        if node["Alive"] and address in away and away[address] != own:
            _open_writer(root, store, archive, own, address)


def _open_writer(root: str, store: Any, archive: str | None, node: str, address: str) -> Any:
    from deployments.activations.nodes.writer import NodeWriter  # needs Arrow, which Serve's controller does not

    on_it = NodeAffinitySchedulingStrategy(node, soft=False)
    writer = detached(NodeWriter, f"{writer_name(root)} {node}", max_concurrency=10_000, scheduling_strategy=on_it)
    return writer.remote(root, store, archive, node, address)
