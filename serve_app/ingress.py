"""The ingress deployment: the HTTP application in a Serve actor. It holds no tensors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.activations.store import connect
from deployments.options import Options
from serve_app.api import build_api
from serve_app.backend import Backend


# Admission is the replicas' business: the limit only stands above it. Its grace is longer than theirs, since
# their streams go through it.
@serve.deployment(max_ongoing_requests=100_000, graceful_shutdown_timeout_s=90, ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Ingress:
    """Takes HTTP requests and delegates them to the model's replicas and the activation store."""

    def __init__(self, options: Options, model: DeploymentHandle[Any]) -> None:
        """Find the actors.

        Args:
            options: The operator's.
            model: The model's replicas.
        """
        self._options = options
        self._model = model
        self._store = connect(options.activations_dir)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this in the replica; it fails where the activation store cannot use its directory."""
        await self._store.check_health.remote()
        backend = Backend(self._options.served_name, self._model, self._store)
        return build_api(backend, self._options.max_body_bytes)
