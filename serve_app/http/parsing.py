"""Parses JSON bodies into schemas, and makes the errors. It imports no Ray: other processes parse large bodies."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

import jiter
from pydantic import BaseModel, ValidationError

from deployments.errors import RequestError, nearest

M = TypeVar("M", bound=BaseModel)
MOST_NESTED = 10_000  # lists and objects in a body: each becomes Python objects, in the server as well
MOST_PATH = 1024  # characters; keys are chosen by the client
NO_TEXT = "the text holds half of a surrogate pair"


class Below(NamedTuple):
    """Fields that are merged below those of a body.

    Attributes:
        header: Those of a header; they come before the preset's.
        preset: Those of a preset; its `interventions` precede the request's own.
        by_default: Whether the request does not name the preset, whose `capture` then needs `store_activations`.
    """

    header: Mapping[str, Any]
    preset: Mapping[str, Any]
    by_default: bool = False

    def merged(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """All fields. A field that is null counts as left out."""
        own = {**self.header, **{name: value for name, value in body.items() if value is not None}}
        found = {**self.preset, **own}
        if first := self.preset.get("interventions"):
            found["interventions"] = [*first, *(own.get("interventions") or ())]
        records = found.get("store_activations")
        if "capture" not in own and (records is False or (self.by_default and not records)):
            found.pop("capture", None)
        return found


def parsed(kind: type[M], raw: bytes, below: Below | None = None) -> M:
    """Parse a JSON text into an object of this kind.

    Args:
        kind: The schema.
        raw: The JSON text.
        below: Fields for those that it leaves out.

    Raises:
        RequestError: It is not JSON in UTF-8, repeats a field of an object, or has too many lists and objects; or names
            the first field that does not fit.
    """
    try:
        values = _values(raw.removeprefix(codecs.BOM_UTF8))
        if raw.count(b"[") + raw.count(b"{") > MOST_NESTED:  # many of them may be inside strings
            _check_nested(values)
        return kind.model_validate(below.merged(values) if below else values)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False), kind) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", None, "invalid_json") from None


def json_object(raw: bytes, field: str) -> dict[str, Any]:
    """Parse a JSON object that is not the body.

    Raises:
        RequestError: It is none; names the field.
    """
    try:
        value = jiter.from_json(raw, catch_duplicate_keys=True)
    except ValueError as error:
        raise RequestError(f"not valid JSON: {error}", field, "invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("send a JSON object", field)
    return value


def _check_nested(values: Any) -> None:
    """Raise a `RequestError` with the first field at which the limit of lists and objects is exceeded."""
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
                message = f"a body may have at most {MOST_NESTED} lists and objects; leave out some of {path or 'them'}"
                raise RequestError(message, path)
            left += inner


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in raw[:4]  # UTF-16 and UTF-32 have zero bytes in ASCII text


def _values(raw: bytes) -> Any:
    try:
        return jiter.from_json(raw, catch_duplicate_keys=True)
    except ValueError as error:
        if not _is_utf8(raw):
            raise RequestError("the body is not valid JSON: send UTF-8", None, "invalid_json") from None
        if "hex escape" not in str(error):
            raise RequestError(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    try:
        return json.loads(raw)  # accepts half of a surrogate pair, so that the error can name its field
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {str(error)[:200]}", None, "invalid_json") from None


def invalid(errors: Iterable[Mapping[str, Any]], kind: type[BaseModel] | None = None) -> RequestError:
    """The error of the field that does not fit, from pydantic's errors.

    A value that fits no branch of a union has an error for each branch; the deepest is the most specific. A misspelt
    field is reported rather than the missing one.

    Args:
        errors: All errors of pydantic.
        kind: The body's schema; the message about an unknown field suggests its nearest name.
    """
    first, *others = errors
    same = [first, *(one for one in others if one["loc"][:1] == first["loc"][:1])]
    deepest = max(len(one["loc"]) for one in same)
    misspelt = [one for one in same if len(one["loc"]) == deepest and _nearest(one, kind)]
    worst = misspelt[0] if misspelt else max(same, key=lambda one: len(one["loc"]))
    context = worst.get("ctx", {})
    if worst["type"] == "extra_forbidden":
        path = ".".join(filter(None, [_path(worst["loc"][:-1]), str(worst["loc"][-1])]))[:MOST_PATH]
        return RequestError(f"unknown field {path!r}{_nearest(worst, kind)}", path, "unknown_field")
    path = context.get("field") or f"{_path(worst['loc'])}{context.get('inner', '')}"[:MOST_PATH]
    message = NO_TEXT if worst["type"] == "string_unicode" else worst["msg"].removeprefix("Value error, ")
    return RequestError(f"{path}: {message}" if path else message, path or None)


def _nearest(error: Mapping[str, Any], kind: type[BaseModel] | None) -> str:
    """The suggestion in the message about an unknown field; empty if no field has a similar name."""
    if kind is None or error["type"] != "extra_forbidden":
        return ""
    *location, name = error["loc"]
    return nearest(str(name), _fields(kind, location))


def _fields(kind: type[BaseModel], location: Iterable[int | str]) -> set[str]:
    """The names of the fields at a place of a body; those of all branches if there are several."""
    kinds = [kind]
    for part in location:
        inner = [model for one in kinds for name, model in _models(one) if name == part]
        # A branch of a union is named after its class, or `op:` and the operation.
        branch = [one for one in kinds if part in (one.__name__, *_tags(one))]
        kinds = inner or branch or kinds
    return {name for one in kinds for name in _names(one)}


def _names(kind: type[BaseModel]) -> dict[str, Any]:
    """The types of a model's fields by their names in a body."""
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


def _tags(kind: type[BaseModel]) -> list[str]:
    """The names of a branch that is selected by its field `op`."""
    return [f"op:{value}" for value in get_args(_names(kind).get("op"))]


def _models(kind: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The names of a model's fields that contain objects, and their models."""
    for name, annotation in _names(kind).items():
        left = [annotation]
        while left:
            one = left.pop()
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield name, one
            left += get_args(one)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`, without the names of a union's branches."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"[a-z][a-z_]*", part) and part not in ("str", "int", "float", "bool", "list", "dict"):
            path += f".{part}" if path else part
    return path
