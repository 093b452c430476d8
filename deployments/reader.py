"""What a model writes, taken apart: thoughts, content and tool calls, by transformers' own parser."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from deployments.call_text import CallText, head, new_id
from deployments.formats import REASONING
from deployments.messages import CallPart

# What the parser raises where a model wrote no proper call: bad JSON, missing keys, nesting without end.
MALFORMED = (ValueError, KeyError, TypeError, RecursionError)


class Written(NamedTuple):
    """What new text amounts to: content and thoughts to show, and parts of tool calls."""

    content: str
    tool_calls: tuple[CallPart, ...] = ()
    reasoning: str = ""


class AnswerReader:
    """Reads one answer as it is written; a malformed call is content, but for what was told of it already.

    Attributes:
        called: Whether there was a call.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str,
        tools: Sequence[dict[str, Any]],
        parallel: bool = True,
        streamed: bool = False,
    ) -> None:
        """Begin an answer.

        Args:
            template: The form of the model's answers.
            prompt: What it answers; it may have begun the answer.
            tools: OpenAI's definitions; without any, what looks like a call is content.
            parallel: Without, what is called behind the first call is left out.
            streamed: Tell of a call while it is written, not once it is whole.
        """
        if not tools:
            fields = {name: field for name, field in template.fields.items() if name != "tool_calls"}
            template = dataclasses.replace(template, fields=fields)
        if not template.start_anchor_re.search(prompt):
            prompt = ""  # the parser would take all of it for the beginning of the answer
        self._calls = template.fields.get("tool_calls")
        self._head = head(self._calls) if self._calls else None
        # By the tools' schemas the parser gives types to arguments that have none; JSON has its own.
        typed: list[Any] = [] if self._head else list(tools)
        self._new_parser = functools.partial(ResponseParser, template, prefix="", tools=typed)
        self._parser = ResponseParser(template, prefix=prompt, tools=typed)
        self._by_character = bool(tools)  # so that a malformed call ends where the parser refuses it
        self._parallel = parallel
        self._streamed = streamed
        self._raw = ""  # what was read and is neither shown nor part of a call yet
        self._before = 0  # calls in earlier regions
        self._parts: list[CallPart] = []  # to be told
        self._enter_nothing()
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
            # What was told stands: text behind arguments is content, the end of arguments that never end is lost.
            refused = "" if self._sent and self._text.inside else self._raw[self._sent :]
            self._before += self._text.begun if self._sent else 0
            self._raw = ""
            self._enter_nothing()
            self._parser = self._new_parser()
            return Written(refused)

    def _written(self, events: Sequence[dict[str, Any]]) -> Written:
        content, reasoning = "", ""
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
            elif field == "tool_calls" and kind == "region_open":
                self._enter()
            elif field == "tool_calls" and kind == "region_chunk":
                self._read_of_raw += len(text)
                self._tell(self._text.add(text))
            elif field == "tool_calls":
                self._leave(_tool_calls(event["value"]))
        return Written(content, reasoning=reasoning)

    def _enter_nothing(self) -> None:
        self._text = CallText()
        self._read_of_raw = 0  # how much of the raw text the parser has told of since it opened the region
        self._sent = 0  # how much of it was told on
        self._held: list[CallPart] = []  # to be told where the region is well formed

    def _enter(self) -> None:
        """A region of calls opens."""
        assert self._calls is not None
        mark = self._calls.open_re.search(self._raw)
        self._text = CallText(self._head, mark.groupdict())
        self._read_of_raw = mark.end()

    def _leave(self, calls: Sequence[tuple[str, str]]) -> None:
        """A region of these calls, each a name and its arguments, closes; those that were not told of follow."""
        assert self._calls is not None
        for number, (name, arguments) in list(enumerate(calls))[self._text.begun :]:
            self._tell([CallPart(number, id=new_id(), name=name), CallPart(number, arguments)])
        self._parts += self._held
        self._before += len(calls)
        mark = self._calls.close_re.match(self._raw, self._read_of_raw) if self._calls.close_re else None
        self._raw = self._raw[mark.end() if mark else self._read_of_raw :]  # a mark may have been seen by what follows
        self._enter_nothing()

    def _tell(self, parts: Iterable[CallPart]) -> None:
        """Tell parts of the open region's calls, at once or where it closes."""
        told = [part._replace(number=self._before + part.number) for part in parts]
        if not self._parallel:
            told = [part for part in told if part.number == 0]
        if not self._streamed:
            self._held += told
        elif told:
            self._parts += told
            self._sent = self._read_of_raw

    def _joined(self, written: Sequence[Written]) -> Written:
        parts, self._parts = tuple(_merged(self._parts)), []
        self.called |= bool(parts)
        return Written("".join(part.content for part in written), parts, "".join(part.reasoning for part in written))


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


def _merged(parts: Iterable[CallPart]) -> Iterator[CallPart]:
    """The same with each call's arguments that come in a row in one part."""
    for (number, id, name), run in itertools.groupby(parts, key=lambda part: (part.number, part.id, part.name)):
        yield CallPart(number, "".join(part.arguments for part in run), id, name)


def _tool_calls(value: Any) -> list[tuple[str, str]]:
    """One call, or several where the model writes them as a list: each a name and its arguments' text."""
    return [_tool_call(call) for call in (value if isinstance(value, list) else [value])]


def _tool_call(value: dict[str, Any]) -> tuple[str, str]:
    function = value["function"]
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise ValueError("a tool call names its function")
    arguments = function.get("arguments", {})
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
