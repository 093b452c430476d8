"""Grammars for answers in llguidance's Lark: JSON by a schema or tool calls, after reasoning if the model has it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deployments.chat.tool_calls import Separators, ToolCallFormat

# Unlimited whitespace would let a model write nothing else.
OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,16}"}  # as in handwritten JSON
# Characters of one line of text before a required call. A model trained to explain first writes worse calls without
# it; with more lines, a model that would have ended there does not stop.
MOST_BEFORE = 96
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Reasoning(NamedTuple):
    """How reasoning is marked, and whether the prompt has already begun it."""

    opening: str
    closing: str
    begun: bool


class GrammarWriter:
    """Writes grammars for one tokenizer."""

    def __init__(self, added: Mapping[str, int]) -> None:
        """Collect the tokens that grammars do not treat as text.

        Args:
            added: The tokenizer's added tokens and their ids.
        """
        self._added = dict(added)
        longest_first = sorted(added, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if added else None

    def answer(self, reasoning: Reasoning | None, schema: Mapping[str, Any] | None, calls: RequiredCalls | None) -> str:
        """The grammar of an answer: after `reasoning`, JSON by `schema`, or `calls`, or either if both are given."""
        kinds = [name for name, given in (("json", schema), ("calls", calls)) if given is not None]
        lines = [f"start: {'reasoning ' if reasoning else ''}({' | '.join(kinds)})"]
        if reasoning:
            lines += self._reasoning(reasoning)
        if schema is not None:
            lines.append(f"json: {schema_rule(schema)}")
        if calls:
            lines += self._calls(calls)
        return "\n".join(lines)

    def literal(self, text: str) -> str:
        """Match exactly this text; its added tokens are matched as tokens."""
        parts = self._split.split(text) if self._split else [text]
        written = (
            f"<[{self._added[part]}]>" if part in self._added else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )
        return " ".join(written) or '""'

    def _reasoning(self, reasoning: Reasoning) -> list[str]:
        space = r"(/[ \n\r\t]{1,8}/)?"
        if reasoning.closing in self._added:
            lines = [f"thought: /(.|\\n)*/ {self.literal(reasoning.closing)}"]
        else:
            lines = [f"thought[suffix={json.dumps(reasoning.closing)}]: /(.|\\n)*/"]
        if reasoning.begun:
            return [f"reasoning: thought {space}", *lines]
        return [f"reasoning: ({self.literal(reasoning.opening)} thought {space})?", *lines]

    def _calls(self, calls: RequiredCalls) -> list[str]:
        form, functions = calls.form, calls.functions
        several = calls.parallel and form.between is not None
        parts = [("begin", form.begin), ("end", form.end)]
        lines = [f"{name}: {self.literal(text)}" for name, text in parts if text]
        more = "(between one)*" if several else ""
        marked = bool(self._split and self._split.match(form.begin))  # by a token that does not occur in text
        parts_of = ["before", "begin"] if marked else ["begin"] if form.begin else []
        lines.append(f"calls: {' '.join(parts_of)} one {more} {'end' if form.end else ''}")
        if marked:
            lines.append(f"before: /[^\\n]{{0,{MOST_BEFORE}}}\\n{{0,2}}/")
        if several:
            lines.append(f"between: {self.literal(form.between or '')}")
        lines.append("one: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            written = schema_rule(arguments(function), form.separators)
            lines.append(f"call_{i}: {self.literal(function['name'] + form.middle)} {written}")
        return lines


class RequiredCalls(NamedTuple):
    """Calls that an answer must contain.

    Attributes:
        form: The format of calls.
        functions: OpenAI's definitions of the functions to choose from.
        parallel: Whether more than one call is allowed.
    """

    form: ToolCallFormat
    functions: Sequence[Mapping[str, Any]]
    parallel: bool


def arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: always an object, empty if the function has no parameters."""
    parameters = function.get("parameters")
    return {**parameters, "type": "object"} if parameters else NO_ARGUMENTS


def schema_rule(schema: Mapping[str, Any], separators: Separators | None = None) -> str:
    """A JSON schema as part of a grammar.

    Args:
        schema: The schema.
        separators: The only separators allowed; a model trained on `": "` writes worse JSON after `":"`.
    """
    options: dict[str, Any] = OPTIONS
    if separators:
        options = {"key_separator": separators.key, "item_separator": separators.item, "whitespace_flexible": False}
    return "%json " + json.dumps({**without_other_properties(schema), "x-guidance": options})


def without_other_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Forbid properties that an object's schema does not name, unless the schema says otherwise.

    Every valid value is also valid for the original schema. JSON schema allows additional properties, so a model could
    invent some; few generated schemas forbid them.
    """
    return schema if _composed(schema) else dict(_closed(schema))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    done = dict(schema)
    for key in schema.keys() & {"properties", "patternProperties", "$defs", "definitions"}:
        if isinstance(schema[key], Mapping):
            done[key] = {name: _closed(part) for name, part in schema[key].items()}
    for key in schema.keys() & {"items", "additionalProperties"}:
        done[key] = _closed(schema[key])
    for key in schema.keys() & {"anyOf", "oneOf", "allOf", "prefixItems"}:
        if isinstance(schema[key], list):
            done[key] = [_closed(part) for part in schema[key]]
    named, required = schema.get("properties"), schema.get("required", ())
    if (
        isinstance(named, Mapping)
        and isinstance(required, Sequence)
        and all(name in list(named) for name in required)
        and not schema.keys() & {"additionalProperties", "patternProperties"}
    ):
        done["additionalProperties"] = False
    return done


def _composed(part: Any) -> bool:
    """Whether several schemas may apply to one object; closing each would exclude the others' properties."""
    if isinstance(part, list):
        return any(map(_composed, part))
    if not isinstance(part, Mapping):
        return False
    several = part.get("allOf")
    if part.keys() & {"if", "not", "dependentSchemas", "unevaluatedProperties", "propertyNames", "minProperties"}:
        return True
    if (isinstance(several, list) and len(several) > 1) or (
        "properties" in part and part.keys() & {"$ref", "allOf", "anyOf", "oneOf"}
    ):
        return True
    return any(map(_composed, part.values()))
