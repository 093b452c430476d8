"""The patterns of response templates in RE2's syntax, and patterns of their prefixes.

Templates are written for `regex`, which backtracks and can report that more text may complete a match. RE2 matches in
linear time and cannot report that. So each pattern gets a second one that matches every prefix of a match.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import re2

# Escapes allowed in a class. RE2's own \s, \d and \w are ASCII; transformers' are Unicode.
CLASSES = {
    sre.CATEGORY_SPACE: r"\s\v\x{1c}-\x{1f}\x{85}\p{Z}",
    sre.CATEGORY_DIGIT: r"\p{Nd}",
    sre.CATEGORY_WORD: r"\p{L}\p{N}_",
}
OPPOSITES = {
    sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
    sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT,
    sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD,
}
Items = Sequence[tuple[Any, Any]]


class UnsupportedPattern(ValueError):
    """A pattern that RE2 cannot express; the message names the part."""


class Translated(NamedTuple):
    """A pattern for RE2.

    Attributes:
        spaced: Whether it begins with any amount of whitespace, which the other attributes omit.
        whole: The pattern without capturing groups.
        named: The pattern with its named groups.
        ahead: The look-ahead after a match; empty if there is none.
        begun: Matches every proper prefix of a match, look-ahead included.
    """

    spaced: bool
    whole: str
    named: str
    ahead: str
    begun: str


def translate(pattern: str) -> Translated:
    """Translate a pattern of a response template to RE2's syntax; it may end with a look-ahead.

    Raises:
        UnsupportedPattern: It has other look-arounds, anchors, flags or references to groups, or matches nothing.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about syntax that a later Python may change
            tree = _parser.parse(pattern, re.DOTALL)
    except re.error as error:
        raise UnsupportedPattern(f"{pattern!r}: {error}") from error
    names = {number: name for name, number in tree.state.groupdict.items()}
    items, ahead = list(tree), []
    if spaced := bool(items) and _is_space(*items[0]):
        items = items[1:]
    if items and items[-1][0] is sre.ASSERT and items[-1][1][0] == 1:
        ahead = list(items.pop()[1][1])
    try:
        if tree.state.flags & ~(re.DOTALL | re.UNICODE):
            raise UnsupportedPattern("it has flags")
        begun = _begun([*items, *ahead])
        if begun is None:
            raise UnsupportedPattern("it matches no text")
        return Translated(spaced, _whole(items), _whole(items, names), _whole(ahead), begun)
    except UnsupportedPattern as error:
        raise UnsupportedPattern(f"{pattern!r}: {error}") from error


def compiled(pattern: str) -> Any:
    """Compile a pattern with RE2.

    Raises:
        UnsupportedPattern: RE2 rejects the pattern.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise UnsupportedPattern(str(error)) from error


def _is_space(op: Any, value: Any) -> bool:
    any_space = [(sre.IN, [(sre.CATEGORY, sre.CATEGORY_SPACE)])]
    return op is sre.MAX_REPEAT and value[:2] == (0, sre.MAXREPEAT) and list(value[2]) == any_space


def _whole(items: Items, names: Mapping[int, str] | None = None) -> str:
    return "".join(_one(op, value, names or {}) for op, value in items)


def _one(op: Any, value: Any, names: Mapping[int, str]) -> str:
    match op:
        case sre.LITERAL:
            return _character(value)
        case sre.NOT_LITERAL:
            return f"[^{_character(value)}]"
        case sre.ANY:
            return "(?s:.)"
        case sre.IN:
            return _class(value)
        case sre.BRANCH:
            return f"(?:{'|'.join(_whole(branch, names) for branch in value[1])})"
        case sre.SUBPATTERN if not (value[1] or value[2]):
            begin = f"(?P<{names[value[0]]}>" if value[0] in names else "(?:"
            return f"{begin}{_whole(value[3], names)})"
        case sre.MAX_REPEAT | sre.MIN_REPEAT:
            least, most, repeated = value
            lazy = "?" if op is sre.MIN_REPEAT else ""
            return f"(?:{_whole(repeated, names)}){_times(least, most)}{lazy}"
    raise UnsupportedPattern(f"{str(op).lower()} cannot be matched in linear time")


def _begun(items: Items) -> str | None:
    """A pattern of proper prefixes of the items' matches; None if there are none."""
    rest: str | None = None
    for op, value in reversed(items):
        ways = [] if rest is None else [_one(op, value, {}) + rest]
        if (begun := _one_begun(op, value)) is not None:
            ways.append(begun)
        rest = f"(?:{'|'.join(ways)})" if ways else None
    return rest


def _one_begun(op: Any, value: Any) -> str | None:
    match op:
        case sre.BRANCH:
            ways = [begun for branch in value[1] if (begun := _begun(branch)) is not None]
            return f"(?:{'|'.join(ways)})" if ways else None
        case sre.SUBPATTERN:
            return _begun(value[3])
        case sre.MAX_REPEAT | sre.MIN_REPEAT:
            _, most, repeated = value
            begun = _begun(repeated) if most else None
            before = most if most is sre.MAXREPEAT else most - 1
            return None if begun is None else f"(?:{_whole(repeated)}){_times(0, before)}{begun}"
    return ""  # a single character has only the empty prefix


def _times(least: int, most: Any) -> str:
    return f"{{{least},{'' if most is sre.MAXREPEAT else most}}}"


def _character(code: int) -> str:
    return f"\\x{{{code:x}}}"


def _class(items: Items) -> str:
    """A class of characters; as alternatives if it has several parts, some of them negated."""
    negated = bool(items) and items[0][0] is sre.NEGATE
    inside, outside = "", []
    for op, value in items[negated:]:
        if op is sre.LITERAL:
            inside += _character(value)
        elif op is sre.RANGE:
            inside += f"{_character(value[0])}-{_character(value[1])}"
        elif value in CLASSES:
            inside += CLASSES[value]
        else:
            outside.append(CLASSES[OPPOSITES[value]])
    if negated and outside:
        if inside or len(outside) > 1:
            raise UnsupportedPattern("a negated class of negated classes cannot be matched in linear time")
        return f"[{outside[0]}]"
    if negated:
        return f"[^{inside}]"
    return "(?:" + "|".join([f"[{inside}]"] * bool(inside) + [f"[^{chars}]" for chars in outside]) + ")"
