"""The Ray cluster that a program joins or starts, and Ray Data as a program's quiet part."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

NAMESPACE = "vitrine"


def join() -> bool:
    """Join the cluster of `RAY_ADDRESS` or of this machine, or start one; whether it was started here.

    One that was started here ends with this process.

    Raises:
        ConnectionError: `RAY_ADDRESS` names no cluster that answers.
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


def quiet_ray_data() -> None:
    """Keep Ray Data's logs and progress bars from the terminal, and its actor for statistics from starting."""
    os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):  # the other writes Ray's log file
            handler.setLevel(logging.CRITICAL)


def this_node() -> dict[str, str]:
    """The label selector of this program's node, for tasks that read its files."""
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
