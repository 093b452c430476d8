"""Splits a model's text into reasoning, content and tool calls by its response template, in linear time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from deployments.chat.call_text import CallText, head, new_id
from deployments.chat.call_values import CallValues
from deployments.chat.marks import MAX_MARK, FoundMark, MarkSearch, begun_answer, mark_search
from deployments.chat.response_templates import REASONING
from deployments.messages import CallPart

# Errors of parsing a malformed call: bad JSON, missing keys, deep nesting.
NOT_PARSED = (ValueError, KeyError, TypeError, RecursionError)


class AnswerParts(NamedTuple):
    """The parts in new text: content, reasoning, and parts of tool calls."""

    content: str
    tool_calls: tuple[CallPart, ...] = ()
    reasoning: str = ""


class AnswerReader:
    """Parses one answer as it is generated; a malformed call is content, except for parts already sent.

    The result is that of transformers' `ResponseParser`, which searches all undecided text again with backtracking
    expressions for each piece. Here undecided text has at most `MAX_MARK` characters, and RE2 searches it.

    Attributes:
        thinking: True if the prompt has begun reasoning and left it open, False if it has also ended it; else None.
        called: Whether the answer contains a call.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str,
        tools: Sequence[dict[str, Any]],
        parallel: bool = True,
        streamed: bool = False,
    ) -> None:
        """Start an answer.

        Args:
            template: The response template of the model.
            prompt: The prompt, which may contain the start of the answer.
            tools: OpenAI's definitions; if empty, text in the form of a call is content.
            parallel: If false, calls after the first are left out.
            streamed: Send a call while it is generated, rather than when it is complete.
        """
        self._fields = {name: field for name, field in template.fields.items() if tools or name != "tool_calls"}
        self._implicit = template.implicit  # the field of text outside marks
        self._parallel = parallel
        self._streamed = streamed
        self._pending = ""  # may be the start of a mark
        self._space: list[str] = []  # whitespace before it, if it may belong to the mark
        self._open: str | None = None  # the field whose opening mark was read
        self._head = None
        if calls := self._fields.get("tool_calls"):
            self._head = head(calls)
            # The tools' schemas give types to arguments without any; JSON has its own.
            self._values = CallValues(calls, () if self._head else tools)
        self._before = 0  # calls in earlier regions
        self._enter_calls("", {})
        self._forget()
        self.thinking: bool | None = None
        self._after_reasoning = False  # and before content; the line ends between belong to the template
        self.called = False
        self._watched = self._watch()
        self._unsent = 0  # characters of the prompt at the start of `_pending`
        self._begin(begun_answer(template, prompt))

    @property
    def reasons(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return (self._open or self._implicit) in REASONING

    def add(self, text: str) -> AnswerParts:
        """Add text."""
        for at in range(0, len(text), MAX_MARK):
            self._read(text[at : at + MAX_MARK])
        return self._gathered()

    def close(self) -> AnswerParts:
        """Process the end of the text."""
        self._read("", last=True)
        self._take(self._spaces())
        self._leave("")
        return self._gathered()

    def _begin(self, text: str) -> None:
        """Read the part of the answer that the prompt contains; it is not sent."""
        begun = self.add(text)
        if self._open in REASONING:
            self.thinking = True
        elif self._after_reasoning or begun.content.strip():
            self.thinking = False
        self._take(self._spaces())
        self._forget()
        self._reasoning_text = TrimmedText(begun=bool(begun.reasoning))
        self._unsent = 0 if self._open == "tool_calls" else len(self._pending)
        self._before = 0
        self._text, self._sent = CallText(), self._length
        self._held.clear()
        self.called = False

    def _forget(self) -> None:
        self._content: list[str] = []  # to be sent, like the next two
        self._reasoning_parts: list[str] = []
        self._parts: list[CallPart] = []
        self._reasoning_text = TrimmedText()

    def _gathered(self) -> AnswerParts:
        parts = tuple(_merged(self._parts))
        written = AnswerParts("".join(self._content), parts, "".join(self._reasoning_parts))
        self._content, self._reasoning_parts, self._parts = [], [], []
        self.called |= bool(parts)
        return written

    def _watch(self) -> MarkSearch:
        """The marks that are possible now: the end of the open field, or the start of any field."""
        name = self._open or self._implicit
        closing = [] if name is None else [(name, self._fields[name].close_re)]
        opening = [] if self._open else [(name, field.open_re) for name, field in self._fields.items()]
        marks = [(name, pattern.pattern) for name, pattern in [*opening, *closing] if pattern is not None]
        self._names = [name for name, _ in marks]
        return mark_search(*(pattern for _, pattern in marks))

    def _read(self, text: str, last: bool = False) -> None:
        text, at = self._pending + text, 0
        while True:
            begin, mark = self._watched.find(text, at, last)
            self._pass(text[at:begin])
            if mark is None:
                self._pending = text[begin:]
                return
            space = self._spaces()
            if not mark.spaced:
                self._take(space)
            self._turn(mark, space * mark.spaced + text[begin : mark.end])
            at = mark.end

    def _pass(self, text: str) -> None:
        """Add text outside marks, but hold back trailing whitespace that may belong to one."""
        text, self._unsent = text[self._unsent :], max(0, self._unsent - len(text))
        shown = text.rstrip() if self._watched.spaced else text
        if shown:
            self._take(self._spaces() + shown)
        self._space.append(text[len(shown) :])

    def _spaces(self) -> str:
        space, self._space = "".join(self._space), []
        return space

    def _turn(self, mark: FoundMark, text: str) -> None:
        """Close the open field, or open one."""
        self._unsent = 0
        name = self._names[mark.pattern]
        begins = self._open is None and name != self._implicit
        self._leave("" if begins else text)
        if begins:
            self._open = name
            if name == "tool_calls":
                self._enter_calls(text, mark.groups)
        self._watched = self._watch()

    def _take(self, text: str) -> None:
        """Add text to the open field."""
        field = self._open or self._implicit
        if field in REASONING:
            self._reasoning_parts.append(self._reasoning_text.add(text))
        elif field == "content":
            self._show(text)
        elif field == "tool_calls":
            self._body.append(text)
            for part, end in self._text.add(text):
                self._send(part, self._length + end)
            self._length += len(text)

    def _show(self, content: str) -> None:
        content = content.lstrip() if self._after_reasoning else content
        self._after_reasoning &= not content
        self._content.append(content)

    def _leave(self, mark: str) -> None:
        """Close the open field with this mark."""
        field, self._open = self._open, None
        if field in REASONING:
            self._after_reasoning = True
        elif field == "tool_calls":
            self._leave_calls(mark)

    def _enter_calls(self, mark: str, groups: dict[str, str]) -> None:
        self._mark = mark
        self._groups = groups
        self._body: list[str] = []
        self._length = len(mark)  # of mark and body together
        self._text = CallText(self._head, groups)
        self._sent = 0  # how much of mark and body was sent
        self._held: list[CallPart] = []  # to be sent if the region is valid

    def _leave_calls(self, mark: str) -> None:
        """End a region of calls, and send the remaining calls."""
        body = "".join(self._body)
        try:
            calls = self._values.read(body, self._groups)
        except NOT_PARSED:
            # Parts already sent remain: text after arguments is content, and unfinished arguments stay unfinished.
            lost = self._sent and self._text.inside
            self._show("" if lost else f"{self._mark}{body}{mark}"[self._sent :])
            self._before += self._text.begun if self._sent else 0
            return
        for number, (name, arguments) in list(enumerate(calls))[self._text.begun :]:
            self._send(CallPart(number, id=new_id(), name=name), self._length)
            self._send(CallPart(number, arguments), self._length)
        self._parts += self._held
        self._before += len(calls)

    def _send(self, part: CallPart, end: int) -> None:
        """Send a part of the open region's calls, which ends at `end`: at once, or when the region closes."""
        part = part._replace(number=self._before + part.number)
        if part.number and not self._parallel:
            return
        if self._streamed:
            self._parts.append(part)
            self._sent = end
        else:
            self._held.append(part)


class TrimmedText:
    """A text in pieces, without leading and trailing whitespace."""

    def __init__(self, begun: bool = False) -> None:
        """Start a text, or continue one that has begun."""
        self._space: list[str] = []
        self._begun = begun

    def add(self, text: str) -> str:
        """Add text and return the part that is certain not to be trailing whitespace."""
        text = text if self._begun else text.lstrip()
        shown = text.rstrip()
        if not shown:
            self._space.append(text)
            return ""
        before, self._space = "".join(self._space), [text[len(shown) :]]
        self._begun = True
        return before + shown


def _merged(parts: Iterable[CallPart]) -> Iterator[CallPart]:
    """Merge consecutive parts of each call's arguments."""
    for (number, id, name), run in itertools.groupby(parts, key=lambda part: (part.number, part.id, part.name)):
        yield CallPart(number, "".join(part.arguments for part in run), id, name)
