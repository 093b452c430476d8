"""Converts every failure to OpenAI's error body. Only this module does so.

ApiError: raised by a route, with status, message and field.
RequestError: a request that the deployments reject; it has its own status.
RequestValidationError: pydantic's, for values in the address: 400, `param` names the field.
HTTPException: starlette's, for an unknown route or a wrong method.
StoreError: the activation store failed, with the reason: 500.
RayTaskError: an actor failed: 500.
RayError, RayServeException, AioRpcError: no replica can answer, or it died meanwhile: 503 with Retry-After.
Anything else: 500 with the request's id; the traceback goes to the log.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.exceptions import HTTPException
from starlette.types import Scope
from starlette.websockets import WebSocket

from deployments.activations.facts import StoreError
from deployments.errors import RequestError
from deployments.messages import Refusal
from serve_app.http.parsing import invalid

logger = logging.getLogger("ray.serve")

NNSIGHT = b"nnsight-version"  # a header that only its clients send
HEADERS = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    410: "not_found_error",
    413: "invalid_request_error",
    416: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}

# Errors of calls whose actor is missing or dies: Ray's, Serve's, and gRPC's, which carries messages between the
# ingress and replicas.
UNAVAILABLE = (RayError, RayServeException, grpc.aio.AioRpcError)


class ApiError(Exception):
    """A failure with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or HEADERS.get(status)

    @classmethod
    def of(cls, refusal: Refusal) -> ApiError:
        """Convert a replica's refusal."""
        return cls(refusal.status, refusal.message, refusal.field, refusal.code)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        kind = TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, scope: Scope) -> JSONResponse:
        """The complete answer to a request."""
        body = self.body
        if NNSIGHT in dict(scope["headers"]):
            body["detail"] = self.message  # the field that nnsight's client shows
        return JSONResponse(body, self.status, self.headers)

    async def close(self, socket: WebSocket) -> None:
        """Reject a socket with a message in it.

        Otherwise nnsight's client shows only `Handshake status 403 Forbidden`. With it, the client reads its listener's
        name, posts its block, and shows the reason why that is rejected, too.
        """
        await socket.accept()
        await socket.send_json({"session_id": "", **self.body})
        await socket.close(1008)  # policy violation


def render(error: Exception, request_id: str) -> ApiError:
    """Convert any exception to the error that the client gets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        error = invalid({**one, "loc": one["loc"][1:]} for one in error.errors())  # the first part is "query" or "path"
    if isinstance(error, RequestError):
        return ApiError(error.status, error.message, error.field, error.code)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), code="not_found" if error.status_code == 404 else None)
    if isinstance(error, StoreError):
        reason = getattr(error, "cause", error)  # Ray adds the actor's traceback to the error
        return ApiError(500, f"the activation store: {reason}", code="store_failed")
    if isinstance(error, UNAVAILABLE) and not isinstance(error, RayTaskError):
        logger.warning("request %s: no replica answered", request_id, exc_info=error)
        return ApiError(503, f"no replica can answer now ({type(error).__name__}); try again", code="unavailable")
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"the server failed on request {request_id}; its log says why", code="internal_error")


def install(api: FastAPI) -> None:
    """Make an application answer every failure with OpenAI's body."""

    async def respond(request: Request, error: Exception) -> JSONResponse:
        response = render(error, getattr(request.state, "request_id", "unknown")).response(request.scope)
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})  # `Allow`, for a wrong method
        return response

    for kind in (ApiError, RequestError, RequestValidationError, HTTPException, *UNAVAILABLE, Exception):
        api.add_exception_handler(kind, respond)
