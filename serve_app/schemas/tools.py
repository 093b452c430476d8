"""The fields of a chat for tools and for the format of its answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from deployments.points.strict import Strict
from serve_app.schemas.base import FreeObject, LongText, Name, free_json

MOST_TEMPLATE_KWARGS = 16 << 10  # characters
TemplateKwargs = Annotated[dict[Name, Any], Field(max_length=32), free_json(MOST_TEMPLATE_KWARGS)]

CallFormat = Literal["hermes"]  # of tool calls, where a chat template shows none


class Function(Strict):
    """A function the model may call, its parameters as JSON schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: LongText | None = None
    parameters: FreeObject = Field(default_factory=dict)
    strict: bool | None = None


class Tool(Strict):
    """A tool the model may call."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=512, fail_fast=True)]


class NamedFunction(Strict):
    """The function's name."""

    name: Name


class NamedTool(Strict):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """A JSON schema that the answer follows, whether `strict` is set or not."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: LongText | None = None
    schema_: FreeObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The format of an answer: any text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the type json_schema needs json_schema; no other type takes it")
        return self

    @property
    def enforced(self) -> dict[str, Any] | None:
        """The JSON schema that the text must follow; None for any text."""
        if self.json_schema:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None
