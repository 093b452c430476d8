"""Chats as the model reads and writes them: its template going in, its tool calls coming out."""

from __future__ import annotations

import contextlib
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
        except (TemplateError, TypeError, ValueError, KeyError) as error:
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


class ToolReader:
    """Reads one answer as it is written, by transformers' own parser."""

    def __init__(self, template: dict[str, Any], prompt: str, tools: Sequence[dict[str, Any]]) -> None:
        self._parser = ResponseParser(template, prefix=prompt, tools=list(tools))
        self._text = ""
        self._shown = 0
        self.called = False

    def add(self, text: str) -> Written:
        """Take more text."""
        self._text += text
        return self._written(self._parser.feed(text))

    def close(self) -> Written:
        """Take the end of the text."""
        _, events = self._parser.finalize()
        return self._written(events)

    def _written(self, events: Sequence[dict[str, Any]]) -> Written:
        content, calls = [], []
        for event in events:
            if event["type"] == "region_chunk" and event["field"] == "content":
                content.append(event.get("text") or "")
            elif event["type"] == "region_close" and event["field"] == "tool_calls":
                calls.append(_tool_call(event["value"]))
        self.called |= bool(calls)
        return Written("".join(content), tuple(calls))


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Templates expect the arguments of earlier calls as an object; OpenAI's clients send them as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        with contextlib.suppress(ValueError):  # text that is no JSON stays text, as the model wrote it
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


def _tool_call(value: dict[str, Any]) -> dict[str, Any]:
    function = value["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    call = {"name": function["name"], "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": call}
