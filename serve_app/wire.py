"""What every JSON object that a client sends has in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class Wire(BaseModel):
    """A JSON object whose every field is known: an ignored `captrue` would cost a user their data."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Body(Wire):
    """A request's body."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, body: Any) -> Any:
        """Refuse what JSON can write and no text can hold: half of a surrogate pair."""
        try:
            field = _unpaired(body, "")
        except RecursionError as error:
            raise PydanticCustomError("too_deep", "the body is nested too deeply") from error
        if field is not None:
            raise PydanticCustomError("not_text", "the text holds half of a surrogate pair", {"field": field})
        return body


def _unpaired(value: Any, path: str) -> str | None:
    """The path of a text that UTF-8 cannot write, if there is one."""
    if isinstance(value, str):
        return None if _encodes(value) else path
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        odd = next((key for key in value if not _encodes(key)), None)
        if odd is not None:
            return f"{path}.{odd}".lstrip(".").encode(errors="backslashreplace").decode()
        inner = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
    elif isinstance(value, list):  # of a million token ids, perhaps
        inner = ((f"{path}[{i}]", item) for i, item in enumerate(value) if not isinstance(item, int))
    return next((found for name, item in inner if (found := _unpaired(item, name)) is not None), None)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
