"""What a model writes, taken apart: thoughts, content and tool calls, by transformers' own parser."""

from __future__ import annotations

import dataclasses
import functools
import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from deployments.formats import REASONING

# What the parser raises where a model wrote no proper call: bad JSON, missing keys, nesting without end.
MALFORMED = (ValueError, KeyError, TypeError, RecursionError)


class Written(NamedTuple):
    """What new text amounts to: content and thoughts to show, and tool calls that are complete, in OpenAI's form."""

    content: str
    tool_calls: tuple[dict[str, Any], ...]
    reasoning: str = ""


class AnswerReader:
    """Reads one answer as it is written; a malformed call is content.

    Attributes:
        called: Whether there was a call.
    """

    def __init__(
        self, template: ResponseTemplate, prompt: str, tools: Sequence[dict[str, Any]], parallel: bool = True
    ) -> None:
        """Begin an answer.

        Args:
            template: The form of the model's answers.
            prompt: What it answers; it may have begun the answer.
            tools: OpenAI's definitions; without any, what looks like a call is content.
            parallel: Without, what is called behind the first call is left out.
        """
        if not tools:
            fields = {name: field for name, field in template.fields.items() if name != "tool_calls"}
            template = dataclasses.replace(template, fields=fields)
        if not template.start_anchor_re.search(prompt):
            prompt = ""  # the parser would take all of it for the beginning of the answer
        self._new_parser = functools.partial(ResponseParser, template, prefix="", tools=list(tools))
        self._parser = ResponseParser(template, prefix=prompt, tools=list(tools))
        self._by_character = bool(tools)  # so that a malformed call ends where the parser refuses it
        self._parallel = parallel
        self._raw = ""  # what was read and is neither shown nor part of a call yet
        self._thoughts = Trimmed()
        self._after_thoughts = self.thinking is False  # and before content, whose line ends there are the template's
        self.called = False

    @property
    def thinking(self) -> bool | None:
        """Whether the prompt has begun thoughts and left them open (True), or begun and ended them (False)."""
        kinds = [event["type"] for event in self._parser.initial_events if event["field"] in REASONING]
        return kinds[-1] != "region_close" if kinds else None

    def add(self, text: str) -> Written:
        """Take more text."""
        return self._joined([self._read(part) for part in (text if self._by_character else [text])])

    def close(self) -> Written:
        """Take the end of the text."""
        return self._joined([self._read(None)])

    def _read(self, text: str | None) -> Written:
        """Take some text, or with None the end."""
        self._raw += text or ""
        try:
            events = self._parser.finalize()[1] if text is None else self._parser.feed(text)
            return self._written(events)
        except MALFORMED:
            refused, self._raw = self._raw, ""
            self._parser = self._new_parser()
            return Written(refused, ())

    def _written(self, events: Sequence[dict[str, Any]]) -> Written:
        content, reasoning, calls = "", "", []
        for event in events:
            kind, field, text = event["type"], event["field"], event.get("text") or ""
            if field in REASONING:
                self._raw = ""
                reasoning += self._thoughts.add(text) if kind == "region_chunk" else ""
                self._after_thoughts |= kind == "region_close"
            elif field == "content" and kind == "region_chunk":
                self._raw = self._raw.removeprefix(text)
                text = text.lstrip() if self._after_thoughts else text
                self._after_thoughts &= not text
                content += text
            elif field == "tool_calls" and kind == "region_close":
                calls += _tool_calls(event["value"])
                self._raw = ""
        return Written(content, tuple(calls), reasoning)

    def _joined(self, parts: Sequence[Written]) -> Written:
        calls = tuple(call for part in parts for call in part.tool_calls)
        if not self._parallel:
            calls = () if self.called else calls[:1]
        self.called |= bool(calls)
        return Written("".join(part.content for part in parts), calls, "".join(part.reasoning for part in parts))


class Trimmed:
    """A text that comes in pieces, without the whitespace around it."""

    def __init__(self) -> None:
        self._space = ""
        self._begun = False

    def add(self, text: str) -> str:
        """Take more of it and give what is known to be inside."""
        text = self._space + (text if self._begun else text.lstrip())
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._begun |= bool(shown)
        return shown


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """One call, or several where the model writes them as a list."""
    return [_tool_call(call) for call in (value if isinstance(value, list) else [value])]


def _tool_call(value: dict[str, Any]) -> dict[str, Any]:
    function = value["function"]
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise ValueError("a tool call names its function")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    call = {"name": function["name"], "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": call}
