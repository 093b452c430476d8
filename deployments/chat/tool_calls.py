"""A model's format of tool calls, derived from its chat template, so that a request can force a call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from deployments.chat.reader import AnswerReader
from deployments.messages import whole_calls

NAME, ID = "probed_function", "probed0id"
ARGUMENTS = {"probed_key": "probed value", "probed_other": "probed value"}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Probe",
        "parameters": {
            "type": "object",
            "properties": dict.fromkeys(ARGUMENTS, {"type": "string", "description": "Probe"}),
        },
    },
}
QUESTION = {"role": "user", "content": "Question"}
Render = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], str]


class Separators(NamedTuple):
    """The JSON separators between a key and its value, and between two items, on one line."""

    key: str
    item: str


class ToolCallFormat(NamedTuple):
    """The text of calls: `begin` name `middle` arguments [`between` name `middle` arguments]* `end`.

    Attributes:
        begin: The text before the first name.
        middle: The text between a name and its arguments, a JSON object.
        between: The text between arguments and the next call's name; None if a message has at most one call.
        end: The text after the last arguments.
        separators: The separators of the arguments; None if they span several lines or differ.
    """

    begin: str
    middle: str
    between: str | None
    end: str
    separators: Separators | None = None

    def text(self, calls: int) -> str:
        """The text of this many calls of the probe."""
        call = NAME + self.middle + json.dumps(ARGUMENTS)
        return self.begin + (self.between or "").join([call] * calls) + self.end


def learn(render: Render, template: ResponseTemplate, ends: Sequence[str]) -> ToolCallFormat | None:
    """Derive how a chat template writes calls, and check that the model's response template parses them.

    Args:
        render: Renders messages and tools, without a generation prompt.
        template: The format of the model's answers.
        ends: Special tokens that may end an answer.

    Returns:
        None if calls are not a name and a JSON object, or are not parsed as they are written.
    """
    form = _one(render, template, ends)
    if form is None or not _reads(template, form.text(1), 1):
        return None
    two = form._replace(between=_between(render, template))
    return two if two.between is not None and _reads(template, two.text(2), 2) else form


def _one(render: Render, template: ResponseTemplate, ends: Sequence[str]) -> ToolCallFormat | None:
    turn = _turn(render, template, 1)
    field = template.fields.get("tool_calls")
    if field is None or not field.open_re:
        return None
    opened = field.open_re.search(turn)
    if not opened or (named := turn.find(NAME, opened.start())) < 0:
        return None
    after = named + len(NAME)
    span = _arguments(turn, after)
    if span is None:
        return None
    start, stop = span
    end = _without_id(turn[stop:])
    closed = field.close_re.search(end) if field.close_re else None
    cut = closed.end() if closed else min((at for text in ends if (at := end.find(text)) >= 0), default=len(end))
    begin, middle = turn[opened.start() : named].lstrip(), turn[after:start]
    return ToolCallFormat(begin, middle, None, end[:cut], _separators(turn[start:stop]))


def _between(render: Render, template: ResponseTemplate) -> str | None:
    turn = _turn(render, template, 2)
    span = _arguments(turn, turn.find(NAME) + len(NAME)) if NAME in turn else None
    if span is None or (again := turn.find(NAME, span[1])) < 0:
        return None
    return _without_id(turn[span[1] : again])


def _turn(render: Render, template: ResponseTemplate, calls: int) -> str:
    """Render an answer with this many calls; empty if the template cannot."""
    call = {"id": ID, "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call] * calls}
    try:
        text = render([QUESTION, answer], [TOOL])
    except (TemplateError, TypeError, ValueError, KeyError):  # a template rejects messages with any of these
        return ""
    return template.truncate_past_last_anchor(text) if template.start_anchor_re.search(text) else ""


def _arguments(turn: str, start: int) -> tuple[int, int] | None:
    """The start and end of the first JSON object after `start`, if it is the probe's."""
    at = turn.find("{", start)
    try:
        value, stop = json.JSONDecoder().raw_decode(turn, at) if at >= 0 else (None, 0)
    except ValueError:
        return None
    return (at, stop) if value == ARGUMENTS else None


def _separators(arguments: str) -> Separators | None:
    for separators in (Separators(": ", ", "), Separators(":", ","), Separators(": ", ",")):
        if arguments == json.dumps(ARGUMENTS, separators=(separators.item, separators.key)):
            return separators
    return None


def _without_id(text: str) -> str:
    """A call without its id, which the model may omit."""
    return re.sub(rf',\s*"id":\s*"{ID}"', "", text)


def _reads(template: ResponseTemplate, text: str, calls: int) -> bool:
    reader = AnswerReader(template, "", [TOOL])
    written = [reader.add(text), reader.close()]
    read = [(call.name, call.arguments) for call in whole_calls(part for parts in written for part in parts.tool_calls)]
    content = "".join(part.content for part in written)
    return read == [(NAME, json.dumps(ARGUMENTS))] * calls and not content.strip()
