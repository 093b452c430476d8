"""Finds the marks at the begin and end of an answer's fields, in text that arrives in pieces.

It takes linear time. RE2 does not backtrack. A mark has at most `MAX_MARK` characters, and so has each piece of text.
So a search covers at most twice as many, and each but the last of a piece advances by a character or to a mark.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from deployments.chat.mark_patterns import Translated, UnsupportedPattern, compiled, translate

MAX_MARK = 256  # characters of a mark with what must follow, without the whitespace before it
AHEAD = "ahead_of_mark"


class FoundMark(NamedTuple):
    """A mark.

    Attributes:
        pattern: Which of the patterns it is of, by its index.
        start: Where it begins, without whitespace.
        end: Where it ends.
        spaced: Whether whitespace before it is part of it.
        groups: What its named groups hold.
    """

    pattern: int
    start: int
    end: int
    spaced: bool
    groups: dict[str, str]


class MarkSearch:
    """Patterns of which the next match is looked for.

    Attributes:
        spaced: Whether whitespace before the mark of one of them is part of the mark.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        """Compile the patterns.

        Raises:
            UnsupportedPattern: RE2 cannot express one of them.
        """
        translated = [translate(pattern) for pattern in patterns]
        begun = "|".join(one.begun for one in translated)
        whole = "|".join(one.whole + one.ahead for one in translated)
        self.spaced = any(one.spaced for one in translated)
        self._marks = [(one.spaced, compiled(_with_ahead(one))) for one in translated]
        self._begun = compiled(begun)
        self._whole = compiled(whole)
        self._either = compiled(f"(?:{begun})\\z|{whole}")

    def find(self, text: str, at: int, last: bool) -> tuple[int, FoundMark | None]:
        """Find the first mark that begins at or after `at`; of several, the longest.

        Args:
            text: At most `2 * MAX_MARK` characters.
            at: Where to begin.
            last: Nothing follows the text.

        Returns:
            The mark, and where it begins. Without a mark, how far there is none, whatever follows.
        """
        pattern = self._whole if last else self._either
        while self._marks and (found := pattern.search(text, at)):
            at = found.start()
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
    """The watch for these patterns, compiled once."""
    return MarkSearch(patterns)


def check(pattern: Any) -> bool:
    """Whether a compiled pattern of a template may match between two characters; a mark there is empty.

    Raises:
        UnsupportedPattern: RE2 cannot express it, or it matches before any text.
    """
    one = translate(pattern.pattern)
    MarkSearch((pattern.pattern,))
    empty = bool(compiled(one.whole).fullmatch(""))
    if empty and compiled(one.ahead).fullmatch(""):
        raise UnsupportedPattern(f"{pattern.pattern!r} matches an empty text")
    return empty


def begun_answer(template: ResponseTemplate, prompt: str) -> str:
    """What a prompt has written of the answer: all after the last anchor; nothing where there is none."""
    found = _last(template.start_anchor_re.pattern).match(prompt)
    return prompt[found.end(1) :] if found else ""


@functools.lru_cache(maxsize=128)
def _last(pattern: str) -> Any:
    """Matches up to the last match of a pattern, in one search."""
    return compiled(f"((?s:.*)(?:{translate(pattern).whole}))")


def _with_ahead(one: Translated) -> str:
    return f"(?:{one.named})" + (f"(?P<{AHEAD}>{one.ahead})" if one.ahead else "")
