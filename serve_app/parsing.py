"""JSON as an object of a kind, or why it is none. It imports no Ray: other processes parse large bodies."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jiter
from pydantic import BaseModel, ValidationError

from deployments.errors import RequestError

M = TypeVar("M", bound=BaseModel)
MOST_NESTED = 10_000  # lists and objects of a body: each becomes objects of Python, in the server as well
MOST_PATH = 1024  # characters: keys are the client's
NO_TEXT = "the text holds half of a surrogate pair"


def parsed(kind: type[M], raw: bytes) -> M:
    """A JSON text as an object of this kind.

    Raises:
        RequestError: It is no JSON in UTF-8, an object names a field twice, it holds too many lists and objects, or the
            first field that does not fit.
    """
    try:
        values = _values(raw.removeprefix(codecs.BOM_UTF8))
        if raw.count(b"[") + raw.count(b"{") > MOST_NESTED:  # many of them may be in texts
            _check_nested(values)
        return kind.model_validate(values)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False)) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", None, "invalid_json") from None


def _check_nested(values: Any) -> None:
    """Raise a `RequestError` with the first field at which there are too many lists and objects."""
    count = 0
    for field, value in values.items() if isinstance(values, dict) else [(None, values)]:
        left: list[Any] = [[value]]
        while left:
            one = left.pop()
            inner = [
                inner for inner in (one.values() if isinstance(one, dict) else one) if isinstance(inner, dict | list)
            ]
            count += len(inner)
            if count > MOST_NESTED:
                path = field and field[:MOST_PATH]
                message = f"a body may hold {MOST_NESTED} lists and objects; leave out some of {path or 'them'}"
                raise RequestError(message, path)
            left += inner


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in raw[:4]  # as UTF-16 and UTF-32 have it in ASCII


def _values(raw: bytes) -> Any:
    try:
        return jiter.from_json(raw, catch_duplicate_keys=True)
    except ValueError as error:
        if not _is_utf8(raw):
            raise RequestError("the body is no valid JSON: send UTF-8", None, "invalid_json") from None
        if "hex escape" not in str(error):
            raise RequestError(f"the body is no valid JSON: {error}", None, "invalid_json") from None
    try:
        return json.loads(raw)  # which takes half of a surrogate pair, so that the field is known that holds it
    except ValueError as error:
        raise RequestError(f"the body is no valid JSON: {str(error)[:200]}", None, "invalid_json") from None


def invalid(errors: Iterable[Mapping[str, Any]]) -> RequestError:
    """What does not fit, by the path of its field: one of pydantic's errors.

    A value that fits no branch of a union brings an error for each; the deepest tells most.
    """
    first, *others = errors
    same = [first, *(one for one in others if one["loc"][:1] == first["loc"][:1])]
    worst = max(same, key=lambda one: len(one["loc"]))
    context = worst.get("ctx", {})
    if worst["type"] == "extra_forbidden":
        path = ".".join(filter(None, [_path(worst["loc"][:-1]), str(worst["loc"][-1])]))[:MOST_PATH]
        return RequestError(f"unknown field {path!r}", path, "unknown_field")
    path = context.get("field") or f"{_path(worst['loc'])}{context.get('inner', '')}"[:MOST_PATH]
    message = NO_TEXT if worst["type"] == "string_unicode" else worst["msg"].removeprefix("Value error, ")
    return RequestError(f"{path}: {message}" if path else message, path or None)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`; names of a union's branches are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"[a-z][a-z_]*", part) and part not in ("str", "int", "float", "bool", "list", "dict"):
            path += f".{part}" if path else part
    return path
