"""Models, their tokens, and the server's health, metrics and usage."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

import serve_app.openapi_examples as examples
from serve_app.http.bodies import JsonRoute
from serve_app.http.errors import HEADERS
from serve_app.http.guard import AdminOnly
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend, CallerAccount, Id, PathId
from serve_app.schemas.models import AttributionRequest, DetokenizeRequest, LoadRequest, TokenizeRequest, UnloadRequest
from serve_app.usage import Usage

open_to_all = APIRouter(tags=["Server"])
served = APIRouter(tags=["OpenAI"], responses=errors(503))
tokens = APIRouter(tags=["Tokens"], responses=errors(404, 429, 503, 504), route_class=JsonRoute)
explored = APIRouter(prefix="/v1/model", tags=["Models"], responses=errors(404, 503, 504), route_class=JsonRoute)
models = APIRouter(
    prefix="/models",
    tags=["Models"],
    dependencies=[AdminOnly],
    responses=errors(403, 404, 503, 504),
    route_class=JsonRoute,
)
server = APIRouter(tags=["Server"], responses=errors(503))
Period = Annotated[str, Query(pattern="^([0-9]{4}(-[0-9]{2}){0,2})?$", description="A year, month or day in UTC.")]


@served.get("/v1/models", responses=examples.MODELS)
async def list_models(backend: AppBackend) -> dict[str, Any]:
    """List the models that are served."""
    return {"object": "list", "data": await backend.models.describe()}


@served.get("/v1/models/{model_id:path}", responses=examples.MODEL | errors(404, 504))
async def retrieve_model(model_id: PathId, backend: AppBackend) -> dict[str, Any]:
    """Show one model; its id may have slashes."""
    return await (await backend.models.find(model_id, at_zero=True)).describe()


@explored.get("/structure", responses=examples.STRUCTURE)
async def model_structure(backend: AppBackend, model: Id | None = None) -> dict[str, Any]:
    """Show a model's sizes, its capture points and its modules."""
    return await (await backend.models.find(model)).structure()


@explored.post("/attribution", responses=examples.ATTRIBUTION)
async def attribution(
    body: AttributionRequest, request: Request, response: Response, backend: AppBackend, who: CallerAccount
) -> dict[str, Any]:
    """Divide a token's logit after a prompt into the parts that layers, heads or neurons add to it directly."""
    used: Usage = request.app.state.usage
    response.headers.update(used.admit(who.owner))
    model = await backend.models.find(body.model)
    try:
        return await model.attribute(body.text, body.targets, body.by, who.owner)
    finally:
        used.charge(who.owner, 0, 0)  # the replica charges the tokens


@models.post("/load", responses=examples.LOADED | errors(409, 429))
async def load_model(body: LoadRequest, backend: AppBackend) -> dict[str, Any]:
    """Load a further model. Answers when it serves, at once if it does already."""
    return await backend.loader.load(body)


@models.post("/unload", responses=examples.UNLOADED | errors(409, 429))
async def unload_model(body: UnloadRequest, backend: AppBackend) -> dict[str, Any]:
    """Unload a model: finish its requests, then remove it; answer when nothing of it is left."""
    return await backend.loader.unload(body.model_id)


@tokens.post("/tokenize", responses=examples.TOKENS)
async def tokenize(body: TokenizeRequest, backend: AppBackend) -> dict[str, Any]:
    """Return the tokens of a prompt, or of a chat as the model's template writes it."""
    model = await backend.models.find(body.model)
    return await model.tokenize(body.text)


@tokens.post("/detokenize", responses=examples.TEXT)
async def detokenize(body: DetokenizeRequest, backend: AppBackend) -> dict[str, Any]:
    """Return the text of tokens, and with `return_token_strs` the text of each."""
    model = await backend.models.find(body.model)
    return await model.detokenize(body.tokens, bool(body.return_token_strs))


@open_to_all.get("/health", responses=examples.HEALTH)
async def health(backend: AppBackend) -> Response:
    """Answer 200 while every loaded model has a replica that can serve, else 503."""
    healthy, body = await backend.models.health()
    return JSONResponse(body) if healthy else JSONResponse(body, 503, HEADERS[503])


@server.get("/metrics", response_class=Response, responses=examples.METRICS)
async def metrics(backend: AppBackend) -> Response:
    """Return the metrics of Vitrine and of Serve, of all nodes, as Prometheus text, read at most once a second."""
    return PlainTextResponse(await backend.metrics.text())


@server.get("/v1/usage", responses=examples.USAGE_BY_OWNER)
async def usage(request: Request, who: CallerAccount, period: Period = "") -> dict[str, Any]:
    """Count the requests and tokens of the key's owner; for an admin, those of each owner."""
    return {"object": "list", "data": await request.app.state.usage.totals(who, period)}
