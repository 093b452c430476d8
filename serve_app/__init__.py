"""The HTTP face: `serve run serve_app:app`, or `serve run serve_app:build_app name=value ...`."""

from ray.serve import Application

from deployments.activations.store import ActivationStore
from deployments.options import Options
from deployments.replica import ModelReplica
from serve_app.ingress import Ingress


def build_app(options: Options) -> Application:
    """Compose the ingress, one model's replicas and the activation store.

    Args:
        options: The operator's; from `serve run` they come as `name=value`, and an unknown one is refused.
    """
    # On the head node, whose disk the operator knows.
    head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    store = ActivationStore.options(ray_actor_options=head).bind(options.activations_dir)  # type: ignore[attr-defined]
    replica = ModelReplica.options(  # type: ignore[attr-defined]
        num_replicas=options.num_replicas,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    )
    return Ingress.bind(options, replica.bind(options, store), store)  # type: ignore[attr-defined, no-any-return]


app = build_app(Options())
