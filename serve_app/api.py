"""The HTTP application: `build_api` composes its routes and middleware."""

from __future__ import annotations

from fastapi import Depends, FastAPI, Security
from fastapi.middleware.cors import CORSMiddleware

import serve_app.http.documentation as documentation
import serve_app.http.page_files as page_files
import serve_app.routes.nnsight as nnsight
from deployments import __version__
from deployments.options import Options
from serve_app.backend.backend import Backend
from serve_app.http.errors import install
from serve_app.http.guard import BEARER, Guard
from serve_app.http.keys import Keys
from serve_app.http.middleware import Limits
from serve_app.openapi import OpenApiApp, errors
from serve_app.routes.activations import activations
from serve_app.routes.dependencies import known_query
from serve_app.routes.generation import PRESET, openai
from serve_app.routes.models import explored, models, served
from serve_app.routes.presets import presets
from serve_app.routes.readouts import readouts
from serve_app.routes.server import open_to_all, server
from serve_app.routes.tensors import tensors
from serve_app.routes.tokens import tokens


def build_api(backend: Backend, options: Options, keys: Keys) -> FastAPI:
    """The whole application.

    Args:
        backend: The actors behind the routes.
        options: The operator's options.
        keys: The API keys.
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
    vitrine = (tokens, explored, models, activations, tensors, readouts, presets)
    for router in (openai, served, *vitrine, nnsight.router, server):
        if keys:
            dependencies = [Security(BEARER), Depends(known_query)]
            api.include_router(router, dependencies=dependencies, responses=errors(401))
        else:
            api.include_router(router, dependencies=[Depends(known_query)])
    return api
