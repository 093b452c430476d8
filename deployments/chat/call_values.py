"""Parses a region of tool calls into names and arguments, as its response template specifies.

It takes linear time: strings are found by their delimiters, and tags by RE2. transformers' parsers use backtracking
expressions for both.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS, parse_content, process_field
from transformers.utils.chat_parsing.response_parser import _coerce, _schema_types
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

from deployments.chat.mark_patterns import UnsupportedPattern, compiled, translate

MOST_TAGS = 256  # in one call; each search for one may read the rest of the text
UNQUOTED_KEY = compiled(r"([{,])([\p{L}\p{N}_]+):")


class CallValues:
    """Parses complete regions of calls."""

    def __init__(self, field: ResponseTemplateField, tools: Sequence[Mapping[str, Any]]) -> None:
        """Prepare to read a field.

        Args:
            field: The template's field of calls.
            tools: OpenAI's definitions; their schemas give the types of arguments that are text.
        """
        self._field = field
        self._as_json = dataclasses.replace(field, content="json", content_args={})
        self._functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._types = functools.cache(self._types_of)

    def read(self, text: str, marks: dict[str, str]) -> list[tuple[str, str]]:
        """Parse a region into calls, each a name and the text of its arguments.

        Args:
            text: The region's text.
            marks: The groups of the mark that opened it.

        Raises:
            ValueError: It is not a call in this form; also KeyError, TypeError, and RecursionError for deep nesting.
        """
        field = self._field
        if field.content != "json" or field.content_args:
            text = json.dumps(parsed(text, field.content, field.content_args))
        value = process_field(text, self._as_json, marks)
        return [self._call(call) for call in (value if isinstance(value, list) else [value])]

    def _call(self, value: Mapping[str, Any]) -> tuple[str, str]:
        function = value["function"]
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise ValueError("a tool call needs the name of its function")
        name, arguments = function["name"], function.get("arguments", {})
        if isinstance(arguments, dict):
            arguments = {key: self._typed(name, key, argument) for key, argument in arguments.items()}
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments)

    def _typed(self, function: str, key: str, argument: Any) -> Any:
        types = self._types(function, key)
        if isinstance(argument, list) and "array" not in types:  # the values of a repeated key
            return [_coerce(value, types) if isinstance(value, str) else value for value in argument]
        return _coerce(argument, types) if isinstance(argument, str) else argument

    def _types_of(self, function: str, key: str) -> tuple[str, ...]:
        """The types of an argument, cached for each function."""
        parameters = self._functions.get(function, {}).get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return tuple(dict.fromkeys(_types(schema, parameters, set())))


def _types(schema: Any, root: Any, followed: set[str]) -> Iterator[str]:
    """The types that a schema allows, in order, including those of `$ref` and `allOf`.

    Args:
        schema: The schema, a part of `root`.
        root: The whole schema, which references name parts of.
        followed: References that were followed already: a schema may refer to itself.
    """
    if not isinstance(schema, Mapping):
        return
    yield from _schema_types({name: schema[name] for name in schema.keys() & {"type", "nullable"}})
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema[name] if isinstance(schema.get(name), list) else ():
            yield from _types(part, root, followed)
    if isinstance(reference := schema.get("$ref"), str) and reference not in followed:
        followed.add(reference)
        part = root
        for name in reference.removeprefix("#/").split("/"):
            part = part.get(name) if isinstance(part, Mapping) else None
        yield from _types(part, root, followed)


def check(field: ResponseTemplateField) -> None:
    """Check that a field of calls can be parsed in linear time.

    Raises:
        UnsupportedPattern: It cannot be.
    """
    content, args = field.content, field.content_args
    while True:
        if content == "kv-lines" or content not in CONTENT_PARSERS:
            raise UnsupportedPattern(f"a tool call cannot be parsed from {content}")
        if content != "xml-inline":
            return
        pattern = _tag(args.get("tag_pattern", ""))
        if "key" not in pattern.groupindex:
            raise UnsupportedPattern(f"{pattern.pattern!r} has no group 'key'")
        value = args.get("value_parser") or {}
        content, args = value.get("name", "text"), value.get("args", {})


def parsed(text: str, content: str, args: dict[str, Any]) -> Any:
    """The value of a text, as in transformers' `parse_content`.

    Raises:
        ValueError: The text does not have this content type.
    """
    if content == "json":
        return _json(text, args)
    if content == "xml-inline":
        return _tags(text, args)
    return parse_content(text, content, args)


def _json(text: str, args: dict[str, Any]) -> Any:
    """Parse JSON whose strings may have other delimiters and whose keys may lack quotes."""
    delimiters = args.get("string_delims", ())
    parts = _split(text, delimiters)
    if args.get("unquoted_keys", False):
        parts[::2] = [UNQUOTED_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(string) for string in parts[1::2]]
    try:
        return json.loads("".join(parts))
    except ValueError:
        if args.get("allow_non_json"):
            return text.strip()
        raise


def _split(text: str, delimiters: Sequence[Sequence[str]]) -> list[str]:
    """Split into text, delimited string, text, and so on."""
    parts = [text]
    for opening, closing in delimiters:
        split = []
        for index, part in enumerate(parts):
            split += [part] if index % 2 else _split_by(part, opening, closing)
        parts = split
    return parts


def _split_by(text: str, opening: str, closing: str) -> list[str]:
    parts, at = [], 0
    while (begin := text.find(opening, at)) >= 0:
        inside = begin + len(opening)
        if (end := text.find(closing, inside)) < 0:
            break
        parts += [text[at:begin], text[inside:end]]
        at = end + len(closing)
    return [*parts, text[at:]]


def _tags(text: str, args: dict[str, Any]) -> dict[str, Any]:
    """Parse the tags that a pattern describes: key -> value, or a list of values if they are merged."""
    values: dict[str, Any] = {}
    for number, match in enumerate(_tag(args["tag_pattern"]).finditer(text)):
        if number == MOST_TAGS:
            raise ValueError(f"a call has more than {MOST_TAGS} arguments")
        groups = match.groupdict()
        key, value = groups["key"], groups.get("value", "")
        if parser := args.get("value_parser"):
            value = parsed(value, parser.get("name", "text"), parser.get("args", {}))
        if key in values and args.get("merge_duplicates", False):
            values[key] = [*values[key], value] if isinstance(values[key], list) else [values[key], value]
        else:
            values[key] = value
    return values


@functools.lru_cache(maxsize=16)
def _tag(pattern: str) -> Any:
    return compiled(translate(pattern).named)
