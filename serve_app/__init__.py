"""The HTTP face: `serve run serve_app:app`, or `serve run serve_app:build_app name=value ...`."""

from ray.serve import Application

from deployments.options import Options
from deployments.replica import ModelReplica
from serve_app.ingress import Ingress


def build_app(options: Options) -> Application:
    """Compose the ingress and one model's replicas; both find the activation store by its directory.

    Args:
        options: The operator's; from `serve run` they come as `name=value`, and an unknown one is refused.
    """
    replica = ModelReplica.options(  # type: ignore[attr-defined]
        num_replicas=options.num_replicas,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    )
    return Ingress.bind(options, replica.bind(options))  # type: ignore[attr-defined, no-any-return]


app = build_app(Options())
