"""The JSON text of tool calls while it is written: a call's name, then its arguments as they come."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import NamedTuple

from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

from deployments.messages import CallPart

STRING = r'"(?:[^"\\]|\\.)*"'


class Head(NamedTuple):
    """What a form of calls has before a call's arguments.

    Attributes:
        pattern: All of it, with the arguments' first brace; its group `name` is the function's, as JSON.
        mark: The group of the mark before the text that names the function, where the text does not.
        several: Whether more calls may follow in the same text.
    """

    pattern: re.Pattern[str]
    mark: str | None
    several: bool


def head(field: ResponseTemplateField) -> Head | None:
    """What stands before arguments in a template's form of calls; None where arguments are no JSON text."""
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
        return Head(re.compile(before + keys), None, field.transform_each)
    if (named := re.fullmatch(r"\{(\w+)\}", name)) and arguments == "{content}" and not field.transform_each:
        return Head(re.compile(r"\s*\{"), named[1], False)
    return None


class CallText:
    """Takes the text of one region apart; whether it is valid JSON is for others to find out.

    A call is told of once its arguments begin. One whose name does not stand right before them is passed over, and
    so are all behind it.

    Attributes:
        begun: How many calls were told of.
    """

    def __init__(self, head: Head | None = None, marks: Mapping[str, str | None] | None = None) -> None:
        """Begin a region.

        Args:
            head: What stands before arguments; without, no call is told of.
            marks: The groups of the mark that opens the region.
        """
        self._head = head
        self._marks = marks or {}
        self._before = ""  # the text since the last arguments
        self._depth = 0  # of brackets in arguments
        self._quoted = False
        self._escaped = False
        self.begun = 0

    @property
    def inside(self) -> bool:
        """Whether arguments are being written."""
        return self._depth > 0

    def add(self, text: str) -> list[CallPart]:
        """Take more text and give the calls' parts in it; calls are counted from 0.

        Raises:
            ValueError: A name is no JSON.
        """
        parts = []
        for character in text:
            if not self.inside:
                self._before += character
                if character != "{" or (name := self._named()) is None:
                    continue
                parts.append(CallPart(self.begun, id=new_id(), name=name))
                self.begun += 1
                self._before = ""
            parts.append(CallPart(self.begun - 1, character))
            self._follow(character)
        return parts

    def _named(self) -> str | None:
        """The function whose arguments begin here."""
        if self._head is None or (self.begun and not self._head.several):
            return None
        found = self._head.pattern.fullmatch(self._before)
        if found is None:
            return None
        return self._marks.get(self._head.mark) if self._head.mark else str(json.loads(found["name"]))

    def _follow(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped, self._quoted = character == "\\", character != '"'
        elif character == '"':
            self._quoted = True
        else:
            self._depth += (character in "{[") - (character in "}]")


def new_id() -> str:
    """An id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"
