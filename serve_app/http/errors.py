"""Converts every failure to OpenAI's error body. Only this module does so."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.exceptions import HTTPException as FrameworkError
from starlette.types import Scope
from starlette.websockets import WebSocket

from deployments.activations.facts import StoreError
from deployments.errors import RequestError
from deployments.messages import Refusal

logger = logging.getLogger("ray.serve")

NNSIGHT = b"nnsight-version"  # a header that only its clients send
MOST_PATH = 1024  # characters; keys are chosen by the client
HEADERS = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    429: "rate_limit_error",
}
# Errors of calls whose actor is missing or dies: Ray's, Serve's, and gRPC's, which carries messages to replicas.
UNAVAILABLE = (RayError, RayServeException, grpc.aio.AioRpcError)


class ApiError(HTTPException):
    """A failure with its HTTP status and the parts of OpenAI's error body."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers or HEADERS.get(status))
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @classmethod
    def of(cls, refusal: Refusal | RequestError) -> ApiError:
        """Convert a refusal of a replica, or an error of the deployments."""
        return cls(refusal.status, refusal.message, refusal.field, refusal.code)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, scope: Scope) -> JSONResponse:
        """The complete answer to a request; nnsight's client shows the field `detail`."""
        detail = {"detail": self.message} if NNSIGHT in dict(scope["headers"]) else {}
        return JSONResponse(self.body | detail, self.status, self.headers)

    async def close(self, socket: WebSocket) -> None:
        """Reject a socket with a message in it.

        Otherwise nnsight's client shows only `Handshake status 403 Forbidden`. With it, the client reads its listener's
        name, posts its block, and shows the reason why that is rejected, too.
        """
        await socket.accept()
        await socket.send_json({"session_id": "", **self.body})
        await socket.close(1008)  # policy violation


@asynccontextmanager
async def within(limit_s: float | None, status: int, message: str) -> AsyncIterator[None]:
    """Answer with this error if the block takes longer than a limit in seconds."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise ApiError(status, message, code="unavailable") from error


def render(error: Exception, request_id: str) -> ApiError:
    """Convert any exception to the error that the client gets; if it is the server's own failure, log it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return invalid(error.errors())
    if isinstance(error, RequestError):
        return ApiError.of(error)
    if isinstance(error, FrameworkError):  # an unknown route, or a wrong method
        code = "not_found" if error.status_code == 404 else None
        return ApiError(error.status_code, str(error.detail), None, code, dict(error.headers or {}))
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
        return render(error, getattr(request.state, "request_id", "unknown")).response(request.scope)

    async def respond_outside(request: Request, error: Exception) -> JSONResponse:
        response = await respond(request, error)
        response.headers["X-Content-Type-Options"] = "nosniff"  # no middleware adds it here
        return response

    for kind in (FrameworkError, RequestError, RequestValidationError, *UNAVAILABLE):
        api.add_exception_handler(kind, respond)
    api.add_exception_handler(Exception, respond_outside)


def invalid(errors: Sequence[Any]) -> ApiError:
    """The error of the first field that does not fit, from pydantic's errors.

    A value that fits no branch of a union has an error for each branch; the deepest is the most specific, and of these
    one of a branch whose type is the value's.
    """
    same = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    worst = max(same, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    context = worst.get("ctx", {})
    location = worst["loc"][1:]  # the first part is `body`, `query` or `path`
    if worst["type"] == "unknown_field":
        path = f"{_path(location[:-1])}.{location[-1]}".removeprefix(".")[:MOST_PATH]
        return ApiError(400, f"unknown field {path!r}{context['nearest']}", path, "unknown_field")
    is_header = worst["loc"][0] == "header"
    path = context.get("field") or (str(location[0]) if is_header else _path(location)[:MOST_PATH])
    message = f"{path or 'the body'}: {worst['msg'].removeprefix('Value error, ')}"
    return ApiError(400, message, path or None, "invalid_value")


def _path(location: Sequence[int | str]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`, without the names of a union's branches."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"[a-z][a-z_]*", part) and part not in ("str", "int", "float", "bool", "list", "dict"):
            path += f".{part}"
    return path.removeprefix(".")
