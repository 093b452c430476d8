"""Chats as the model reads and writes them: its template going in, its tool calls coming out."""

from __future__ import annotations

import contextlib
import functools
import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser

from deployments.errors import RequestError


class Written(NamedTuple):
    """What new text amounts to: content to show, and tool calls that are complete, in OpenAI's form."""

    content: str
    tool_calls: tuple[dict[str, Any], ...]


class ChatFormat:
    """One model's chat template, and the reverse of it."""

    def __init__(self, tokenizer: Any, hf: Any) -> None:
        self._tokenizer = tokenizer
        self._response_template = get_response_template(tokenizer, hf)

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
        """The prompt of a chat.

        Raises:
            RequestError: The model has no chat template, or it refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        try:
            text = self._tokenizer.apply_chat_template(
                [_with_parsed_arguments(message) for message in messages],
                tools=tools,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            # A template is the model's own program: what it cannot render, it says in ways of its own.
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
        return str(text)

    def tokenize(self, prompt: str) -> list[int]:
        """Token ids of a rendered prompt, whose special tokens are already in it."""
        ids: list[int] = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return ids

    def reader(self, prompt: str, tools: Sequence[dict[str, Any]]) -> ToolReader:
        """Take tool calls out of an answer to `prompt`.

        Raises:
            RequestError: Nobody knows how this model writes its tool calls.
        """
        if self._response_template is None:
            raise RequestError("this model's form of tool calls is not known to transformers", "tools")
        return ToolReader(self._response_template, prompt, tools)


# What the parser raises where a model wrote no proper call: bad JSON, missing keys, nesting without end.
MALFORMED = (ValueError, KeyError, TypeError, RecursionError)


class ToolReader:
    """Reads one answer as it is written, by transformers' own parser; a malformed call is content."""

    def __init__(self, template: dict[str, Any], prompt: str, tools: Sequence[dict[str, Any]]) -> None:
        self._new_parser = functools.partial(ResponseParser, template, prefix=prompt, tools=list(tools))
        self._parser = self._new_parser()
        self._raw = ""  # what was read and is neither shown nor part of a call yet
        self.called = False

    def add(self, text: str) -> Written:
        """Take more text."""
        # By character, so that a malformed call ends where the parser refuses it.
        return self._joined([self._read(character) for character in text])

    def close(self) -> Written:
        """Take the end of the text."""
        return self._joined([self._read(None)])

    def _read(self, character: str | None) -> Written:
        """Take one character, or with None the end."""
        self._raw += character or ""
        try:
            events = self._parser.finalize()[1] if character is None else self._parser.feed(character)
            return self._written(events)
        except MALFORMED:
            refused, self._raw = self._raw, ""
            self._parser = self._new_parser()
            return Written(refused, ())

    def _written(self, events: Sequence[dict[str, Any]]) -> Written:
        content, calls = [], []
        for event in events:
            if event["type"] == "region_chunk" and event["field"] == "content":
                content.append(event.get("text") or "")
                self._raw = self._raw.removeprefix(content[-1])
            elif event["type"] == "region_close" and event["field"] == "tool_calls":
                calls.append(_tool_call(event["value"]))
                self._raw = ""
        return Written("".join(content), tuple(calls))

    def _joined(self, parts: Sequence[Written]) -> Written:
        calls = tuple(call for part in parts for call in part.tool_calls)
        self.called |= bool(calls)
        return Written("".join(part.content for part in parts), calls)


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Templates expect the arguments of earlier calls as an object; OpenAI's clients send them as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            with contextlib.suppress(ValueError):  # text that is no JSON stays text, as the model wrote it
                function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


def _tool_call(value: dict[str, Any]) -> dict[str, Any]:
    function = value["function"]
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise ValueError("a tool call names its function")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    call = {"name": function["name"], "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": call}
