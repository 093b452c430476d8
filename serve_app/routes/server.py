"""Health and metrics."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response

import serve_app.openapi_examples as examples
from serve_app.http.errors import HEADERS
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend

server = APIRouter(tags=["Server"], responses=errors(503))


open_to_all = APIRouter(tags=["Server"])


@open_to_all.get("/health", responses=examples.HEALTH)
async def health(backend: AppBackend) -> Response:
    """Answer 200 while every loaded model has a replica that can serve, else 503."""
    healthy, body = await backend.models.health()
    return JSONResponse(body) if healthy else JSONResponse(body, 503, HEADERS[503])


@server.get("/metrics", response_class=Response, responses=examples.METRICS)
async def metrics(backend: AppBackend) -> Response:
    """Return the metrics of Vitrine and of Serve, of all nodes, as Prometheus text; they are at most a second old."""
    return PlainTextResponse(await backend.metrics.text())
