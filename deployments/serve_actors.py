"""This project's actors in Ray Serve: their environment, and the names of applications."""

from __future__ import annotations

import os
from typing import Any

from deployments.errors import LoadError
from deployments.options import Options

# Between the names of an ingress's application and of a model, in the name of the model's own application.
MODELS = ".models."

_MESSAGE_LENGTH = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
_MESSAGE_BYTES = 256 << 20
GRPC = {_MESSAGE_LENGTH: str(_MESSAGE_BYTES)}

# Ray Serve's switches, for this project's actors only: each uses one event loop instead of three.
FAST_PATH = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


def environment(options: Options) -> dict[str, Any]:
    """Ray options of an actor that serves: its environment, which allows messages as large as bodies."""
    length = max(_MESSAGE_BYTES, 2 * options.max_readout_file_bytes)
    length = min(length, (1 << 31) - 1)  # gRPC's own limit
    return {"runtime_env": {"env_vars": FAST_PATH | {_MESSAGE_LENGTH: str(length)}}}


def check_environment(options: Options, deployment: str) -> None:
    """Check that the actor of this process has its environment, which Serve reads before the actor is constructed.

    Args:
        options: The operator's options.
        deployment: The actor's deployment.

    Raises:
        LoadError: A file for `serve deploy` replaced the options of the deployment's actors.
    """
    needed = environment(options)["runtime_env"]["env_vars"]
    if any(os.environ.get(name) != value for name, value in needed.items()):
        message = (
            f"ray_actor_options of {deployment} in the file for `serve deploy` dropped variables that it needs: set "
            "num_cpus and num_gpus as options in `args` instead, or add to ray_actor_options "
            f"runtime_env: {{env_vars: {needed}}}"
        )
        raise LoadError(message, "ray_actor_options", "environment_dropped", 500)
