"""The ingress deployment: the HTTP application in a Serve actor. It holds no tensors."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.context import _get_global_client  # the one way to learn where the proxies listen
from ray.serve.handle import DeploymentHandle

from deployments.activations.permissions import make_private
from deployments.activations.retention import Retention
from deployments.activations.store import connect
from deployments.options import Options
from serve_app.api import build_api
from serve_app.backend import Backend
from serve_app.code_jobs import check_who_may_ask
from serve_app.keys import Keys

RAY_TOKEN = Path.home() / ".ray" / "auth_token"  # Ray makes it, and lets everybody read it


# Admission is the replicas' business: the limit only stands above it.
@serve.deployment(max_ongoing_requests=100_000)
@serve.ingress()
class Ingress:
    """Takes HTTP requests and delegates them to the models' replicas and the activation store."""

    def __init__(self, options: Options, keys: Keys, *models: DeploymentHandle[Any]) -> None:
        """Find the actors.

        Args:
            options: The operator's.
            keys: Who may ask.
            models: The replicas of the model that the server starts with, if there is one; bound, so that they belong
                to the application, and found like those of any other model.
        """
        self._options = options
        self._keys = keys
        self._store = connect(options.activations_dir)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this in the replica.

        It fails where the activation store cannot use its directory, and where everybody could run code here.
        """
        if self._options.allow_client_code:
            controller = _get_global_client()
            assert controller is not None
            check_who_may_ask(self._keys, controller.http_config.host)
        make_private(RAY_TOKEN)
        limits = Retention(*(getattr(self._options, field.name) for field in fields(Retention)))
        await self._store.retain.remote(limits)
        backend = Backend(self._options, serve.get_replica_context().app_name, self._store, not self._keys)
        return build_api(backend, self._options, self._keys)
