"""Deployment of this project's actors: their settings in Serve, and a model's replicas."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from deployments.options import Options
from deployments.replica.replica import ModelReplica

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
    length = max(_MESSAGE_BYTES, 2 * max(options.max_body_bytes, options.max_readout_file_bytes))
    length = min(length, (1 << 31) - 1)  # gRPC's own limit
    return {"runtime_env": {"env_vars": FAST_PATH | {_MESSAGE_LENGTH: str(length)}}}


def replicas(options: Options, **deployment: Any) -> Application:
    """One model's replicas, which stop after their last request has ended.

    Args:
        options: The model's options.
        deployment: Further options of the Serve deployment.
    """
    actor = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus, **environment(options)}
    replica = ModelReplica.options(  # type: ignore[attr-defined]
        num_replicas=options.num_replicas,
        ray_actor_options=actor,
        graceful_shutdown_timeout_s=options.request_timeout_s,
        **deployment,
    )
    return replica.bind(options)  # type: ignore[no-any-return]


def loaded(options: Options) -> Application:
    """A model that is loaded and unloaded at run time: an application of its own, without a route.

    Serve stops deploying it at the first replica that fails, unless one has started; the loader handles that case.
    """
    return replicas(options, max_constructor_retry_count=1)
