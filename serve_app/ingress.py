"""The ingress deployment: the HTTP application in a Serve actor. It holds no tensors."""

from __future__ import annotations

import gc
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.context import _get_global_client  # the only way to find the proxies' addresses
from ray.serve.handle import DeploymentHandle

from deployments.activations.actors.reader import connect_reader
from deployments.activations.actors.store import connect
from deployments.activations.limits import Retention
from deployments.exposure import check_http, check_ray, make_private
from deployments.options import Options
from serve_app.api import build_api
from serve_app.backend.backend import Backend
from serve_app.http.keys import Keys

RAY_TOKEN = Path.home() / ".ray" / "auth_token"  # made by Ray, which lets everyone read it


# The replicas do the admission: this limit is above theirs.
@serve.deployment(max_ongoing_requests=100_000)
@serve.ingress()
class Ingress:
    """Receives HTTP requests and passes them to the models' replicas and the activation store."""

    def __init__(self, options: Options, keys: Keys, *models: DeploymentHandle[Any]) -> None:
        """Get the handles of the actors.

        Args:
            options: The operator's options.
            keys: The API keys.
            models: The replicas of the model that the server starts with, if any; only binds them to the application,
                since they are found like those of any other model.

        Raises:
            LoadError: Ray's ports are open to everyone.
            ValueError: The HTTP port is open to everyone.
        """
        check_ray(options)
        controller = _get_global_client()
        assert controller is not None
        check_http(options, bool(keys), controller.http_config.host)
        self._options = options
        self._keys = keys
        self._store = connect(options.activations_dir, options.archive, options.archive_cache_bytes)
        self._reader = connect_reader(options.activations_dir, options.archive)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve in the replica; fails if the activation store cannot use its directory."""
        make_private(RAY_TOKEN)
        limits = Retention(*(getattr(self._options, field.name) for field in fields(Retention)))
        await self._store.check_archive.remote(self._options.archive or "")
        application = serve.get_replica_context().app_name
        await self._store.retain.remote(limits, application=application)
        backend = Backend(self._options, application, self._store, self._reader)
        # A body with many lists makes Python's collector visit all objects; permanent ones are excluded.
        gc.freeze()
        return build_api(backend, self._options, self._keys)
