"""The application's OpenAPI schema, and the errors of its routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from serve_app.http.errors import HEADERS, ApiError

Responses = dict[int | str, dict[str, Any]]  # in the form of FastAPI's routes

FAILURES = {  # by status: what it means, and an example's code
    400: ("A bad field; `param` is its path.", "invalid_value"),
    401: ("No API key, or an unknown one.", "invalid_api_key"),
    403: ("The key's role does not allow it, or the data is another key's.", "insufficient_permissions"),
    404: ("No such thing.", "model_not_found"),
    409: ("The model is loaded with other settings, or cannot be unloaded.", "model_loading"),
    410: ("No longer known.", "job_not_found"),
    413: ("The body is over the limit.", "body_too_large"),
    429: ("All places are taken, or the allowance of this minute is used up.", "server_busy"),
    500: ("The server's own failure; its log has the request's id.", "internal_error"),
    503: ("Nothing can answer now.", "unavailable"),
    504: ("The server's time limit is over.", "timeout"),
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
    responses: Responses = {}
    for status in statuses:
        description, code = FAILURES[status]
        responses |= failure(description, ApiError(status, description, None, code))
    return responses


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
