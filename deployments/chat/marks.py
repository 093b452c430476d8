"""Finds the marks at the start and end of an answer's fields, in text that arrives in pieces.

It takes linear time, because RE2 does not backtrack. A mark and a piece of text have at most `MAX_MARK` characters
each. A search therefore covers at most twice as many, and all searches of a piece but the last advance.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from deployments.chat.mark_patterns import Translated, UnsupportedPattern, compiled, translate

MAX_MARK = 256  # characters of a mark and its look-ahead, without the whitespace before it
AHEAD = "ahead_of_mark"


class FoundMark(NamedTuple):
    """A mark.

    Attributes:
        pattern: The index of the pattern.
        start: Its start, after leading whitespace.
        end: Its end.
        spaced: Whether whitespace before it belongs to it.
        groups: The texts of its named groups.
    """

    pattern: int
    start: int
    end: int
    spaced: bool
    groups: dict[str, str]


class MarkSearch:
    """A search for the next match of several patterns.

    Attributes:
        spaced: Whether a mark of any of them includes the whitespace before it.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        """Compile the patterns.

        Raises:
            UnsupportedPattern: RE2 cannot express one of them.
        """
        translated = [translate(pattern) for pattern in patterns]
        begun = "|".join(pattern.begun for pattern in translated)
        whole = "|".join(pattern.whole + pattern.ahead for pattern in translated)
        self.spaced = any(pattern.spaced for pattern in translated)
        self._marks = [(pattern.spaced, compiled(_with_ahead(pattern))) for pattern in translated]
        self._begun = compiled(begun)
        self._whole = compiled(whole)
        self._either = compiled(f"(?:{begun})\\z|{whole}")

    def find(self, text: str, at: int, last: bool) -> tuple[int, FoundMark | None]:
        """Find the first mark that begins at or after `at`; among several, the longest.

        Args:
            text: At most `2 * MAX_MARK` characters.
            at: Where to start.
            last: Whether the text is complete.

        Returns:
            The start of the mark, and the mark. Without a mark, the position before which none can begin.
        """
        pattern = self._whole if last else self._either
        while self._marks and (match := pattern.search(text, at)):
            at = match.start()
            window = text[at : at + MAX_MARK]
            if not last and len(window) < MAX_MARK and self._begun.fullmatch(window):
                return at, None
            if marks := [mark for index in range(len(self._marks)) if (mark := self._match(index, window, at))]:
                return at, max(marks, key=lambda mark: mark.end)
            at += 1
        return len(text), None

    def _match(self, index: int, window: str, at: int) -> FoundMark | None:
        spaced, pattern = self._marks[index]
        mark = pattern.match(window)
        if mark is None:
            return None
        groups = {name: value for name, value in mark.groupdict().items() if value is not None}
        followed = pattern.groupindex.get(AHEAD)
        end = mark.start(followed) if followed else mark.end()
        groups.pop(AHEAD, None)
        return FoundMark(index, at, at + end, spaced, groups)


@functools.lru_cache(maxsize=128)
def mark_search(*patterns: str) -> MarkSearch:
    """The search for these patterns, compiled once."""
    return MarkSearch(patterns)


def check(pattern: Any) -> bool:
    """Whether a template's compiled pattern can match between two characters; such a mark is empty.

    Raises:
        UnsupportedPattern: RE2 cannot express it, or it matches an empty text.
    """
    translated = translate(pattern.pattern)
    MarkSearch((pattern.pattern,))
    empty = bool(compiled(translated.whole).fullmatch(""))
    if empty and compiled(translated.ahead).fullmatch(""):
        raise UnsupportedPattern(f"{pattern.pattern!r} matches an empty text")
    return empty


def begun_answer(template: ResponseTemplate, prompt: str) -> str:
    """The part of an answer that a prompt already contains: the text after the last anchor; empty without one."""
    anchor = _last(template.start_anchor_re.pattern).match(prompt)
    return prompt[anchor.end(1) :] if anchor else ""


@functools.lru_cache(maxsize=128)
def _last(pattern: str) -> Any:
    """A pattern that matches up to the last match of `pattern`, in one search."""
    return compiled(f"((?s:.*)(?:{translate(pattern).whole}))")


def _with_ahead(translated: Translated) -> str:
    return f"(?:{translated.named})" + (f"(?P<{AHEAD}>{translated.ahead})" if translated.ahead else "")
