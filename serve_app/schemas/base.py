"""Fields of JSON bodies: limits on texts, lists of tokens and free values."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

MOST_TOKENS = 1 << 20  # of a prompt: the longest context of any model
MOST_TEXT = 2 << 20  # characters, as many as a body may have bytes
MOST_JSON = 1 << 18  # characters of a free value as JSON
JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # shared: `json.dumps` makes one in each call

Name = Annotated[str, Field(max_length=1024)]
LongText = Annotated[str, Field(max_length=MOST_TEXT)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def packed_ids(tokens: Sequence[int]) -> Sequence[int]:
    """Token ids as an array, which is sent to other processes much faster than a list."""
    return array("i", tokens)


class free_json:
    """The limit of a value without a schema: its size as JSON in characters, and finite numbers."""

    def __init__(self, most: int = MOST_JSON) -> None:
        self.most = most

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Acts as an `AfterValidator`."""
        inner: CoreSchema = AfterValidator(self._checked).__get_pydantic_core_schema__(source, handler)
        return inner

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """JSON schema cannot express the limit."""
        return handler(schema) | {"x-max-characters": self.most}

    def _checked(self, value: Any) -> Any:
        try:
            text = JSON.encode(value)
        except ValueError as error:
            raise ValueError("holds a number that is not finite") from error
        if len(text) > self.most:
            raise ValueError(f"it may have {self.most} characters as JSON")
        return value


def only(types: Sequence[str], what: str, default: str | None = None) -> BeforeValidator:
    """Refuse objects of other types than these by the name of their type; `what` names these in the error."""

    def check(value: Any) -> Any:
        kind = value.get("type", default) if isinstance(value, dict) else default
        if kind is not None and kind not in types:
            raise ValueError(f"this server takes {what}: leave out the type {str(kind)[:64]!r}")
        return value

    return BeforeValidator(check)


def unread(_: Any) -> None:
    """Drop a value that has no effect, after validation."""


FreeObject = Annotated[dict[Name, Any], Field(max_length=1024, fail_fast=True), free_json()]
Unread = Annotated[Any, free_json(), AfterValidator(unread)]
UnreadObject = Annotated[FreeObject, AfterValidator(unread)]
