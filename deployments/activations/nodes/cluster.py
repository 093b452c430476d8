"""The cluster's nodes: the handles of their writers, and which are about to be released."""

from __future__ import annotations

import contextlib
from typing import Any

import psutil
import ray
from ray.experimental.internal_kv import _internal_kv_get

from deployments.clusters import NAMESPACE

_MONITORS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
_STATUS = b"__autoscaling_status"  # ray._private.ray_constants.DEBUG_AUTOSCALING_STATUS


def writer_on(root: str, node: str) -> Any:
    """The handle of the writer of a node, by its id in Ray; ValueError if there is none."""
    return ray.get_actor(f"{writer_name(root)} {node}", namespace=NAMESPACE)


def actors(prefix: str) -> list[str]:
    """The names of the cluster's actors that begin so."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in found if one["namespace"] == NAMESPACE and one["name"].startswith(prefix)]


def node_writers(root: str) -> list[Any]:
    """The handles of all nodes' writers of a store; none where this process has joined no cluster."""
    found = []
    for name in actors(writer_name(root)) if ray.is_initialized() else ():
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
