"""Parsing of JSON bodies: bounded before it, so that none holds the event loop for long."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Coroutine
from typing import Any

import jiter
from fastapi import Request, Response
from fastapi.routing import APIRoute

from serve_app.http.errors import ApiError

MOST_BYTES = 2 << 20  # of a body
MOST_PARTS = 20_000  # lists, objects and names of a body, each of which takes microseconds; strings and numbers do not
# Matches a body that has more. What is in a string does not count. Possessive, so that it takes linear time.
_TOO_MANY = re.compile(rb'(?>(?:[^"\[{:]++|"(?:[^"\\]++|\\.)*+(?:"|\Z))*+[\[{:]){%d}' % (MOST_PARTS + 1), re.DOTALL)


def parsed(raw: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ApiError: It is not JSON in UTF-8, repeats a field of an object, has more than 200 lists or objects within each
            other, or too many of them in all.
    """
    if _TOO_MANY.match(raw):
        raise ApiError(400, f"a body may have at most {MOST_PARTS} lists, objects and names", None, "invalid_json")
    try:
        return jiter.from_json(raw.removeprefix(codecs.BOM_UTF8), catch_duplicate_keys=True)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}", None, "invalid_json") from None


def json_object(raw: bytes, field: str) -> dict[str, Any]:
    """A JSON object that is not the body.

    Raises:
        ApiError: It is none; names the field.
    """
    try:
        value = parsed(raw)
    except ApiError as error:
        raise ApiError(400, error.message.replace("the body", "it"), field, error.code) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{field}: send a JSON object", field, "invalid_value")
    return value


class JsonRequest(Request):
    """A request whose JSON body `parsed` reads, once."""

    async def json(self) -> Any:
        """The body's value."""
        if not hasattr(self, "_json"):
            self._json = parsed(await self.body())
        return self._json


class JsonRoute(APIRoute):
    """A route that receives a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls with each request."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
