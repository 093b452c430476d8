"""The base class of all JSON objects from clients: unknown fields are rejected."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from deployments.errors import nearest


class Strict(BaseModel):
    """A JSON object without unknown fields: an ignored `captrue` would cost a user their data."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_no_unknown_field(cls, value: Any) -> Any:
        """Report one unknown field, with the nearest known name, before all other errors."""
        known = _names(cls)
        if isinstance(value, dict) and not value.keys() <= known:
            name = next(name for name in value if name not in known)
            near = nearest(name, cls._meant(value)) if isinstance(name, str) else ""
            error = PydanticCustomError("unknown_field", "there is no such field{nearest}", {"nearest": near})
            raise ValidationError.from_exception_data(cls.__name__, [{"type": error, "loc": (name,), "input": None}])
        return value

    @classmethod
    def _meant(cls, value: dict[Any, Any]) -> frozenset[str]:
        """The fields that an unknown one of this object may stand for."""
        refused = (None, type(None))  # annotations of fields that only null fits
        fits = (field.alias or name for name, field in cls.model_fields.items() if field.annotation not in refused)
        return frozenset(fits)


@cache
def _names(kind: type[Strict]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())
