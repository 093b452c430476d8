"""The HTTP face: `serve run serve_app:app`, or `serve run serve_app:build_app name=value ...`."""

import os

from ray.serve import Application

from deployments.options import NO_MODEL, Options
from serve_app.applications import ENVIRONMENT, GRPC, replicas
from serve_app.ingress import Ingress
from serve_app.keys import Keys

# Serve's proxies are none of this application's actors: they speak gRPC to the ingress where Ray was started with
# this. `serve run serve_app:app` starts Ray, where none runs yet, after it has imported this module; elsewhere, put
# it before `ray start` (as `cluster.yaml` does).
RAY_ENVIRONMENT = GRPC | {"RAY_SERVE_PROXY_USE_GRPC": "1"}
for _name, _value in RAY_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


def build_app(options: Options) -> Application:
    """Compose the ingress and one model's replicas; both find the activation store by its directory.

    Args:
        options: The operator's; from `serve run` they come as `name=value`, and an unknown one is refused.

    Raises:
        ValueError: The API keys are not written as they should be.
        OSError: The file with the API keys cannot be read.
    """
    ingress = Ingress.options(  # type: ignore[attr-defined]
        ray_actor_options={"num_cpus": 0, **ENVIRONMENT},
        graceful_shutdown_timeout_s=options.request_timeout_s + 30,  # the replicas' streams go through it
    )
    models = [] if options.model == NO_MODEL else [replicas(options)]
    return ingress.bind(options, Keys.read(options.api_keys_file), *models)  # type: ignore[no-any-return]


app = build_app(Options())
