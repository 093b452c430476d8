"""The HTTP face: `serve run serve_app:app`, or `serve run serve_app:build_app name=value ...`."""

from ray.serve import Application

from deployments.options import Options
from deployments.replica import ModelReplica
from serve_app.ingress import Ingress

# Ray Serve's own switches, for this application's actors alone: each serves on one event loop instead of three, and
# takes messages by gRPC (`backend.py`) as large as bodies may be.
FAST_PATH = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
}


def build_app(options: Options) -> Application:
    """Compose the ingress and one model's replicas; both find the activation store by its directory.

    Args:
        options: The operator's; from `serve run` they come as `name=value`, and an unknown one is refused.
    """
    environment = {"runtime_env": {"env_vars": FAST_PATH}}
    replica = ModelReplica.options(  # type: ignore[attr-defined]
        num_replicas=options.num_replicas,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus, **environment},
    )
    ingress = Ingress.options(ray_actor_options={"num_cpus": 0, **environment})  # type: ignore[attr-defined]
    return ingress.bind(options, replica.bind(options))  # type: ignore[no-any-return]


app = build_app(Options())
