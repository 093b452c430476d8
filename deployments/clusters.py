"""Joining or starting a Ray cluster, and Ray Data without its log output."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

NAMESPACE = "vitrine"
STORE = "activation store of "  # what the name of a store's actor starts with, before its directory
HEAD = "node:__internal_head__"  # a resource that only the head node has
ON_HEAD = {HEAD: 0.001}  # for an actor that stays there


def join() -> bool:
    """Join the cluster of `RAY_ADDRESS` or of this machine, or start one; returns whether it was started.

    A started cluster ends with this process.

    Raises:
        ConnectionError: The cluster of `RAY_ADDRESS` does not answer.
    """
    settings: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    given = os.environ.get("RAY_ADDRESS")
    if given != "local":
        try:
            ray.init("auto", **settings)
            return False
        except ConnectionError:
            if given:
                raise
    ray.init("local", include_dashboard=False, **settings)
    return True


def detached(actor: type, name: str, **options: Any) -> Any:
    """An actor class whose `.remote(...)` creates the actor or finds the existing one.

    The actor has a name in the whole cluster, outlives the application that created it, ends with the cluster, restarts
    automatically, and reserves no core.

    Args:
        actor: The class.
        name: The actor's name.
        options: Further options of Ray.
    """
    own = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
    return ray.remote(actor).options(**own, max_restarts=-1, num_cpus=0, **options)


def detached_names(prefix: str) -> list[str]:
    """What follows `prefix` in the names of the cluster's detached actors that start with it."""
    names = ray.util.list_named_actors(all_namespaces=True)
    own = (actor["name"] for actor in names if actor["namespace"] == NAMESPACE)
    return [name.removeprefix(prefix) for name in own if name.startswith(prefix)]


def quiet_ray_data() -> None:
    """Keep Ray Data's logs and progress bars off the terminal, and do not start its statistics actor."""
    os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for handler in logging.getLogger("ray.data").handlers:
        # Ray's other handler writes its log file; further ones belong to the program.
        if isinstance(handler, logging.StreamHandler) and type(handler).__module__.startswith("ray."):
            handler.setLevel(logging.CRITICAL)


def this_node() -> dict[str, str]:
    """The label selector of this program's node, for tasks that read its files."""
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
