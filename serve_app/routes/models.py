"""Models: listing, structure, loading and unloading."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

import serve_app.openapi_examples as examples
from serve_app.http.bodies import JsonRoute
from serve_app.http.guard import AdminOnly
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend
from serve_app.routes.parameters import Id, PathId
from serve_app.schemas.models import LoadRequest, UnloadRequest

served = APIRouter(tags=["OpenAI"], responses=errors(503))


models = APIRouter(
    prefix="/models",
    tags=["Models"],
    dependencies=[AdminOnly],
    responses=errors(403, 404, 503, 504),
    route_class=JsonRoute,
)


explored = APIRouter(prefix="/v1/model", tags=["Models"], responses=errors(404, 503, 504))


@served.get("/v1/models", responses=examples.MODELS)
async def list_models(backend: AppBackend) -> dict[str, Any]:
    """List the models that are served."""
    return {"object": "list", "data": await backend.models.describe()}


@served.get("/v1/models/{model_id:path}", responses=examples.MODEL | errors(404, 504))
async def retrieve_model(model_id: PathId, backend: AppBackend) -> dict[str, Any]:
    """Show one model; its id may have slashes."""
    model = await backend.models.find(model_id)
    return await model.describe()


@explored.get("/structure", responses=examples.STRUCTURE)
async def model_structure(backend: AppBackend, model: Id | None = None) -> dict[str, Any]:
    """Show a model's sizes, its capture points and its modules."""
    found = await backend.models.find(model)
    return await found.structure()


@models.post("/load", responses=examples.LOADED | errors(409, 429))
async def load_model(body: LoadRequest, backend: AppBackend) -> dict[str, Any]:
    """Load a further model. Answers when it serves, at once if it does already."""
    return await backend.loader.load(body)


@models.post("/unload", responses=examples.UNLOADED | errors(409, 429))
async def unload_model(body: UnloadRequest, backend: AppBackend) -> dict[str, Any]:
    """Unload a model: finish its requests, then remove it; answer when nothing of it is left."""
    return await backend.loader.unload(body.model_id)
