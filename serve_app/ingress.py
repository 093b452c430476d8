"""The ingress deployment: the HTTP application in a Serve actor. It holds no tensors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.options import Options
from serve_app.api import build_api
from serve_app.backend import Backend


# Admission is the replicas' business: the limit only stands above it.
@serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Ingress:
    """Takes HTTP requests and delegates them to the model's replicas and the activation store."""

    def __init__(self, options: Options, model: DeploymentHandle[Any], store: DeploymentHandle[Any]) -> None:
        self._options = options
        self._backend = Backend(options.served_name, model, store)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this in the replica."""
        return build_api(self._backend, self._options.max_body_bytes)
