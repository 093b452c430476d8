"""Whether nodes can be released, and which are about to be."""

from __future__ import annotations

import psutil
import ray
from ray.experimental.internal_kv import _internal_kv_get

_MONITORS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
_STATUS = b"__autoscaling_status"  # ray._private.ray_constants.DEBUG_AUTOSCALING_STATUS


def releases_nodes() -> bool:
    """Whether Ray's autoscaler can release nodes of this cluster; for a process on the head node.

    Ray's monitor runs on each head node, and scales only where it was given a configuration. On Kubernetes it runs in a
    container of its own, and shows by its status alone.
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
