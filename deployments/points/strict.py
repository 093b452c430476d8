"""The base class of all JSON objects from clients: unknown fields are rejected."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """A JSON object without unknown fields: an ignored `captrue` would cost a user their data."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_one_unknown_field(cls, value: Any) -> Any:
        """Keep one of many unknown fields: one error is enough."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next(name for name in value if name not in known)
        return {name: inner for name, inner in value.items() if name in known} | {first: value[first]}
