"""Tool calls as JSON text while they are streamed: the name first, then the arguments piece by piece."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

from deployments.chat.mark_patterns import compiled
from deployments.messages import CallPart

STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9A-Fa-f]{4})*"'
MAX_HEAD = 512  # characters before arguments; a call with a longer head is sent once it is complete


class Head(NamedTuple):
    """The text before a call's arguments in one form of calls.

    Attributes:
        pattern: Matches this text and the arguments' first brace; its group `name` is the function's name as JSON.
        mark: The group of the opening mark that names the function, if the text does not.
        several: Whether more calls can follow in the same text.
    """

    pattern: Any  # RE2's
    mark: str | None
    several: bool


def head(field: ResponseTemplateField) -> Head | None:
    """The head of a template's form of calls; None if arguments are not JSON text."""
    function = field.transform.get("function") if isinstance(field.transform, dict) else None
    if function == "{content}":
        function = {"name": "{content.name}", "arguments": "{content.arguments}"}
    if field.content != "json" or field.content_args or not isinstance(function, dict):
        return None
    of_key = r"\{(\w+)\}" if field.transform_each else r"\{content\.(\w+)\}"
    name, arguments = (str(function.get(part)) for part in ("name", "arguments"))
    if (named := re.fullmatch(of_key, name)) and (given := re.fullmatch(of_key, arguments)):
        before = r"[^{]*" if field.transform_each else r"\s*"
        keys = rf'\{{\s*"{named[1]}"\s*:\s*(?P<name>{STRING})\s*,\s*"{given[1]}"\s*:\s*\{{'
        return Head(compiled(before + keys), None, field.transform_each)
    if (named := re.fullmatch(r"\{(\w+)\}", name)) and arguments == "{content}" and not field.transform_each:
        return Head(compiled(r"\s*\{"), named[1], False)
    return None


class CallText:
    """Splits the text of one region into calls, without validating the JSON.

    A call is sent once its arguments begin. A call whose name does not directly precede them is skipped, and so are all
    calls after it. The skipped text is bounded, because RE2 reads it again at each brace.

    Attributes:
        begun: The number of calls sent.
    """

    def __init__(self, head: Head | None = None, marks: Mapping[str, str | None] | None = None) -> None:
        """Start a region.

        Args:
            head: The text before arguments; if None, no call is sent.
            marks: The groups of the mark that opens the region.
        """
        self._head = head
        self._marks = marks or {}
        self._before = ""  # the text since the last arguments
        self._depth = 0  # depth of brackets in arguments
        self._quoted = False
        self._escaped = False
        self.begun = 0

    @property
    def inside(self) -> bool:
        """Whether the text is inside arguments."""
        return self._depth > 0

    def add(self, text: str) -> Iterator[tuple[CallPart, int]]:
        """Add text and return the parts of calls in it, each with its end; calls are counted from 0."""
        at = 0
        while at < len(text):
            if not self.inside and (name := self._begins(text[at])) is None:
                at += 1
                continue
            if not self.inside:
                yield CallPart(self.begun, id=new_id(), name=name), at + 1
                self.begun += 1
                self._before = ""
            end = self._follow(text, at)
            yield CallPart(self.begun - 1, text[at:end]), end
            at = end

    def _begins(self, character: str) -> str | None:
        """The name of the function whose arguments begin with this character, if they do."""
        if len(self._before) == MAX_HEAD:
            self._head = None
        if self._head is None:
            return None
        self._before += character
        return self._named(self._head) if character == "{" else None

    def _named(self, head: Head) -> str | None:
        if self.begun and not head.several:
            return None
        match = head.pattern.fullmatch(self._before)
        if match is None:
            return None
        return self._marks.get(head.mark) if head.mark else str(json.loads(match["name"]))

    def _follow(self, text: str, at: int) -> int:
        """The end of arguments that continue at `at`, or the end of the text."""
        for end, character in enumerate(text[at:], at + 1):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            else:
                self._depth += (character in "{[") - (character in "}]")
            if not self._depth:
                return end
        return len(text)


def new_id() -> str:
    """An id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"
