"""Where each message of a chat is in its prompt.

Templates trim texts, leave out earlier reasoning and move the system message. The chat is therefore rendered once more,
with a private character before and after each text. Without these characters, the rendering must equal the prompt.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

from deployments.chat.response_templates import REASONING as FIELDS
from deployments.points.placement import Turns
from deployments.points.token_choices import REASONING, ROLES, TEMPLATE

FIRST_MARK, LAST_MARK = 0xF0000, 0xFFFFD  # private characters: one for generation marks, then two for each message
MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]")
PROBE = "probe"
Messages = Sequence[Mapping[str, Any]]
Marks = Sequence[tuple[str, str]]
Render = Callable[..., str]  # of messages, and how they end; empty if the template rejects them


class Span(NamedTuple):
    """Characters `start` to before `stop` of a prompt, which belong to a message, and perhaps to its reasoning."""

    start: int
    stop: int
    message: int
    is_reasoning: bool = False


def with_marks(template: str) -> str:
    """A template that writes a private character for each generation mark; transformers' own search is not thread-safe.

    The character is in a block, so that the template still removes the whitespace around the mark.
    """
    block = rf"{{%\1 if true %}}{chr(FIRST_MARK)}{{% endif \2%}}"
    return re.sub(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}", block, template)


def spans(messages: Messages, text: str, render: Render, marks: Marks, ends: Sequence[str]) -> list[Span] | None:
    """Find the messages of a chat, then the reasoning in them.

    Args:
        messages: The chat.
        text: Its prompt.
        render: Renders other messages as the chat was rendered; with `ending` as in a job, to another end.
        marks: Texts before and after reasoning.
        ends: Special tokens that may end a message.

    Returns:
        None if they cannot be found.
    """
    if MARK.search(text):
        return None
    for trims in (False, True):
        rendered = render([_marked(message, number, marks, trims) for number, message in enumerate(messages)])
        if MARK.sub("", rendered) == text:
            break
    else:
        return None
    if (found := _found(rendered, text, marks)) is None:
        return None
    pieces, generation = found
    whole = {message: _around([*own]) for message, own in groupby(pieces, lambda piece: piece.message)}
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(generation) == len(assistants):
        whole |= {i: Span(*of, i) for i, of in zip(assistants, generation, strict=True)}
    elif calling := [i for i in assistants if messages[i].get("tool_calls")]:
        probe = {"role": "assistant", "content": chr(FIRST_MARK) + PROBE + chr(FIRST_MARK)}
        after = MARK.split(render([{"role": "user", "content": PROBE}, probe], "turn"))[-1].strip()
        ends = [*filter(None, (*ends, after))]
        gaps = dict[str, str]()  # from a message of a role to one with calls, so that few need renderings of their own
        for i in calling:
            role, before = (messages[i - 1]["role"], whole.get(i - 1)) if i else ("", None)
            if before and role in gaps and text.startswith(gaps[role], before.stop):
                start = before.stop + len(gaps[role])
            elif not (start := _start_of_calls(messages, i, text, render)):
                return None
            elif before:
                gaps[role] = text[before.stop : start]
            stop = min((at for end in ends if (at := text.find(end, start)) >= 0), default=None)
            if stop is None or any(end in str(messages[i]) for end in ends):  # the first may be in a call
                return None
            span = Span(start, stop, i)
            whole[i] = _around([span, *(piece for piece in pieces if piece.is_reasoning and piece.message == i)])
    ordered = sorted(whole.values())
    if any(before.stop > span.start for before, span in pairwise(ordered)):
        return None
    return [*ordered, *(piece for piece in pieces if piece.is_reasoning)]


def _around(pieces: Sequence[Span]) -> Span:
    starts, stops, messages, _ = zip(*pieces, strict=True)
    return Span(min(starts), max(stops), messages[0])


def _marked(message: Mapping[str, Any], number: int, marks: Marks, trims: bool) -> dict[str, Any]:
    """The message with private characters around its texts; with `trims`, within the whitespace around them."""

    def marked(text: str, is_reasoning: bool, trims: bool = trims) -> str:
        inner = text.strip() if trims else text
        mark = chr(FIRST_MARK + 1 + 2 * number + is_reasoning)
        return text.replace(inner, mark + inner + mark, 1) if inner else text

    told = dict(message) | {field: marked(message[field], True) for field in FIELDS if message.get(field)}
    content = message.get("content") or ""
    opening, closing = next((pair for pair in marks if pair[1] in content), ("", ""))
    if closing and message["role"] == "assistant":
        thoughts, _, rest = content.partition(closing)
        before, opening, thoughts = thoughts.rpartition(opening)
        told["content"] = before + opening + marked(thoughts, True, True) + closing + marked(rest, False, True)
    elif content:
        told["content"] = marked(content, False)
    return told


def _found(rendered: str, text: str, marks: Marks) -> tuple[list[Span], list[tuple[int, int]]] | None:
    """The marked texts of a rendering by their messages, and those between generation marks; None if one is cut."""
    opened, pieces, generation = dict[int, int](), list[Span](), list[tuple[int, int]]()
    for before, match in enumerate(MARK.finditer(rendered)):
        number, at = ord(match[0]) - FIRST_MARK, match.start() - before
        if number not in opened:
            opened[number] = at
        elif number == 0:
            generation.append((opened.pop(number), at))
        else:
            message, is_reasoning = divmod(number - 1, 2)
            start, stop = opened.pop(number), at
            if is_reasoning:
                start, stop = _with_marks(text, start, stop, marks)
            pieces.append(Span(start, stop, message, bool(is_reasoning)))
    if 0 in opened:  # the prompt ends in a message that is to be continued
        generation.append((opened.pop(0), len(text)))
    if opened or len({piece[2:] for piece in pieces}) < len(pieces):
        return None  # a text is cut, or repeated
    return sorted(pieces, key=lambda piece: piece.message), generation


def _with_marks(text: str, start: int, stop: int, marks: Marks) -> tuple[int, int]:
    """Reasoning with the marks around it, which may have whitespace between."""
    before, after = text[:start].rstrip(), text[stop:].lstrip()
    for opening, closing in marks:
        if before.endswith(opening.rstrip()):
            start = len(before) - len(opening.rstrip())
        if after.startswith(closing):
            stop = len(text) - len(after) + len(closing)
    return start, stop


def _start_of_calls(messages: Messages, number: int, text: str, render: Render) -> int:
    """Where an answer, or a text before the calls, would begin in place of a message with calls; 0 if unknown."""
    bare = [{key: value for key, value in message.items() if key not in FIELDS} for message in messages[: number + 1]]
    mark, after = chr(FIRST_MARK) + PROBE, messages[number + 1 :]
    before = ""
    # Templates differ in which reasoning they keep. A text in place of the message, or in it, shows where it begins.
    for told, *ending in (
        (messages[:number], "answer"),
        (bare[:number], "answer"),
        ([*messages[:number], {"role": "assistant", "content": mark}, *after],),
        ([*messages[:number], bare[number] | {"content": mark}, *after],),
    ):
        before = MARK.sub("", render(told, *ending).partition(mark)[0])
        if before and text.startswith(before):
            break
    return len(commonprefix([text, before]))


def turns(messages: Messages, found: Sequence[Span], offsets: Sequence[tuple[int, int]], answers: bool) -> Turns:
    """The roles of a prompt's tokens. A token belongs to a message if it has any of its characters.

    Args:
        messages: The chat.
        found: What `spans` returns.
        offsets: Each token's first character, and the one after its last.
        answers: Whether a new message follows.
    """
    ends = [end for _, end in offsets]
    # Some tokenizers leave the whitespace of a token out of its offsets.
    starts = [min(start, end) for (start, _), end in zip(offsets, [0, *ends], strict=False)]
    roles, of = [TEMPLATE] * len(offsets), [-1] * len(offsets)
    for start, stop, message, is_reasoning in found:
        first, last = bisect_right(ends, start), bisect_left(starts, stop)
        role = REASONING if is_reasoning else ROLES.index(messages[message]["role"])
        roles[first:last], of[first:last] = [role] * (last - first), [message] * (last - first)
    speakers = [message["role"] for message in messages]
    return Turns(roles, of, [*speakers, "assistant"] if answers else speakers)
