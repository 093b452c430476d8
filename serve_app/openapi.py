"""The application's OpenAPI schema, and the errors of its routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.types import ASGIApp

from serve_app.http.errors import HEADERS, ApiError
from serve_app.http.middleware import NoSniff

Responses = dict[int | str, dict[str, Any]]  # in the form of FastAPI's routes

FAILURES = {
    "A bad field; `param` is its path.": ApiError(
        400, "temperature: Input should be less than or equal to 2", "temperature", "invalid_value"
    ),
    "No API key, or an unknown one.": ApiError(401, "no valid API key", None, "invalid_api_key"),
    "The key's role does not allow it, or the data is another key's.": ApiError(
        403, "needs the role admin", None, "insufficient_permissions"
    ),
    "No such thing.": ApiError(404, "the model 'other' is not served here", "model", "model_not_found"),
    "The model is loaded with other settings, or cannot be unloaded.": ApiError(
        409, "'m' is being loaded with other settings; try again when it is there", "model_id", "model_loading"
    ),
    "No longer known.": ApiError(410, "job '5f2b' is unknown or has expired", "job_id", "job_not_found"),
    "The body is over the limit.": ApiError(413, "the body is larger than 16777216 bytes", None, "body_too_large"),
    "All places are taken.": ApiError(429, "all 1088 places of this replica are taken", None, "server_busy"),
    "The server's own failure; its log has the request's id.": ApiError(
        500, "the server failed on request 1f0c; its log says why", None, "internal_error"
    ),
    "Nothing can answer now.": ApiError(503, "no replica can answer now; try again", None, "unavailable"),
    "The server's time limit is over.": ApiError(504, "not done after the server's limit of 600 s", None, "timeout"),
}


class ErrorDetail(BaseModel):
    """The details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error body, which every failure has."""

    error: ErrorDetail


class OpenApiApp(FastAPI):
    """FastAPI without the 422 of every route: a bad request gets 400 here."""

    def build_middleware_stack(self) -> ASGIApp:
        """The middleware of all requests; middleware added here also applies to answers to unexpected errors."""
        return NoSniff(super().build_middleware_stack())

    def openapi(self) -> dict[str, Any]:
        """The schema of all routes."""
        schema = super().openapi()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        return schema


def errors(*statuses: int) -> Responses:
    """These failures, each with its body, an example and its headers."""
    found: Responses = {}
    for description, error in FAILURES.items():
        if error.status in statuses:
            found |= failure(description, error)
    return found


def failure(description: str, error: ApiError) -> Responses:
    """One failure with its body, an example and its headers."""
    return {
        error.status: {
            "model": ErrorBody,
            "description": description,
            "content": {"application/json": {"example": error.body}},
            "headers": {
                name: {"schema": {"type": "string"}, "example": value}
                for name, value in HEADERS.get(error.status, {}).items()
            },
        }
    }
