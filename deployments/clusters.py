"""The Ray cluster that a program joins or starts."""

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
