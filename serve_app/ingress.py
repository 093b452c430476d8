"""The ingress deployment: the HTTP application with its routes and middleware, in a Serve actor without tensors."""

from __future__ import annotations

import gc
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Security
from fastapi.middleware.cors import CORSMiddleware
from ray import serve
from ray.serve.context import _get_global_client  # the only way to find the proxies' addresses
from ray.serve.handle import DeploymentHandle

import serve_app.http.documentation as documentation
import serve_app.http.page_files as page_files
import serve_app.routes.nnsight as nnsight
from deployments import __version__
from deployments.activations.actors.reader import connect_reader
from deployments.activations.actors.store import connect
from deployments.activations.limits import Retention
from deployments.exposure import check_http, check_ray, make_private
from deployments.options import Options
from deployments.serve_actors import check_environment
from serve_app.backend.backend import Backend
from serve_app.http.errors import install
from serve_app.http.guard import BEARER, Guard
from serve_app.http.keys import Keys
from serve_app.http.middleware import MOST_JOB, Limits
from serve_app.http.uploads import Uploads
from serve_app.kept_responses import KeptResponses
from serve_app.openapi import OpenApiApp, errors
from serve_app.routes.activations import activations
from serve_app.routes.client_data import lenses, presets, readouts, tensors
from serve_app.routes.dependencies import known_query
from serve_app.routes.generation import PRESET, openai
from serve_app.routes.models import explored, models, open_to_all, served, server, tokens
from serve_app.usage import Usage

RAY_TOKEN = Path.home() / ".ray" / "auth_token"  # made by Ray, which lets everyone read it


# The replicas do the admission: this limit is above theirs. One that hangs is replaced after half a minute.
@serve.deployment(max_ongoing_requests=100_000, health_check_period_s=5, health_check_timeout_s=10)
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
            LoadError: Ray's ports are open to everyone, or the actor lacks variables.
            ValueError: The HTTP port is open to everyone, or there would be several ingresses.
        """
        check_ray(options)
        check_environment(options, "Ingress")
        configured = serve.get_replica_context()._deployment_config  # there is no public way
        if configured.num_replicas != 1 or configured.autoscaling_config is not None:
            raise ValueError(
                "there is one ingress: loads, limits and caches are of its process. Remove num_replicas and "
                "autoscaling_config of Ingress from the file for `serve deploy`, and scale the model's replicas by the "
                "options num_replicas or autoscaling"
            )
        controller = _get_global_client()
        assert controller is not None
        check_http(options, bool(keys), controller.http_config.host)
        self._options = options
        self._keys = keys
        self._backend: Backend | None = None
        self._store = connect(options.activations_dir, options.archive, options.archive_cache_bytes)
        self._reader = connect_reader(options.activations_dir, options.archive)
        self._usage = Usage(options, self._store)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve in the replica; fails if the activation store cannot use its directory."""
        make_private(RAY_TOKEN)
        limits = Retention(*(getattr(self._options, field.name) for field in fields(Retention)))
        await self._store.check_archive.remote(self._options.archive or "")
        application = serve.get_replica_context().app_name
        await self._store.retain.remote(limits, application=application)
        self._backend = Backend(self._options, application, self._store, self._reader)
        # Before it takes requests from an ingress that it replaces.
        await self._backend.models.refresh(limit_s=None)
        await self._backend.presets.prepare()
        # A body with many lists makes Python's collector visit all objects; permanent ones are excluded.
        gc.freeze()
        return build_api(self._backend, self._options, self._keys, self._usage)

    async def charge(self, owner: str | None, prompt_tokens: int, completion_tokens: int) -> None:
        """Called by a replica for tokens that no answer contains, such as those of a client that disconnected."""
        self._usage.charge(owner, prompt_tokens, completion_tokens, requests=0)

    async def __del__(self) -> None:
        """Called by Serve after the last request, with the rest of the time for stopping; the process ends then."""
        backend: Backend | None = getattr(self, "_backend", None)  # missing if the constructor failed
        if backend:
            await self._usage.send()
        if backend and backend.jobs:
            await backend.jobs.finish()


def build_api(backend: Backend, options: Options, keys: Keys, usage: Usage | None = None) -> FastAPI:
    """The whole application.

    Args:
        backend: The actors behind the routes.
        options: The operator's options.
        keys: The API keys.
        usage: Limits and counts by owner; by default new ones, which are not kept.
    """
    api = OpenApiApp(
        title="Vitrine",
        version=__version__,
        description="Hugging Face language models behind the OpenAI API, with their internals open.",
        responses=errors(400, 413, 500),
        docs_url=None,  # it would load scripts from another origin
        redoc_url=None,
    )
    api.state.backend = backend
    api.state.usage = usage or Usage(options, None)
    api.state.responses = KeptResponses()
    api.state.uploads = Uploads(max(options.max_readout_file_bytes, MOST_JOB))
    # The middleware added last runs first.
    api.add_middleware(Guard, options=options, keys=keys)
    api.add_middleware(Limits, options=options)
    if options.cors_origins:  # outside the others, so that a page can also read their refusals
        api.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "Accept-Ranges", "Content-Range", PRESET],
        )
    install(api)
    # These accept any query: load balancers and browsers add parameters, and a socket has no body for an error.
    api.include_router(open_to_all)
    api.include_router(documentation.router)
    api.include_router(page_files.router)
    api.include_router(nnsight.sockets)  # the guard checks its key, too
    vitrine = (tokens, explored, models, activations, tensors, readouts, lenses, presets)
    for router in (openai, served, *vitrine, nnsight.router, server):
        if keys:
            dependencies = [Security(BEARER), Depends(known_query)]
            api.include_router(router, dependencies=dependencies, responses=errors(401))
        else:
            api.include_router(router, dependencies=[Depends(known_query)])
    return api
