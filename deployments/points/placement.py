"""Choices of tokens by text and by role become positions in one sequence."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeGuard

from deployments.errors import RequestError
from deployments.points.token_choices import (
    ASSISTANT,
    NOTHING_GENERATED,
    REASONING,
    Positions,
    Spoken,
    TextPiece,
    TokenChoice,
    Tokens,
)

UNKNOWN = "the chat template does not show where this chat's messages are: choose positions or text"
NO_CHAT = "a prompt without messages has no roles: choose prompt, generated, answer, text or positions"
Role = Spoken | Literal["reasoning", "answer"]
# Returns a prompt's text with special tokens, and the number of characters before each token and after the last.
Ends = Callable[[], tuple[str, Sequence[int]]]


class Turns(NamedTuple):
    """The messages of a chat, and which of its tokens belong to which.

    Attributes:
        roles: [tokens] the index in `ROLES` of each token's role.
        turns: [tokens] the index of each token's message; -1 for none.
        speakers: The role of each message; a generated answer is the last one, or continues it.
    """

    roles: Sequence[int]
    turns: Sequence[int]
    speakers: Sequence[str]

    def chosen(self, choice: Role) -> tuple[list[int], bool]:
        """The positions of the tokens that a choice means, ascending, and whether the last message is among them."""
        if not isinstance(choice, Spoken):
            role = REASONING if choice == "reasoning" else ASSISTANT
            return [i for i, own in enumerate(self.roles) if own == role], True
        wanted = [i for i, speaker in enumerate(self.speakers) if choice.role in (None, speaker)]
        if choice.turn is not None:
            wanted = [wanted[choice.turn]] if -len(wanted) <= choice.turn < len(wanted) else []
        meant = set(wanted)
        return [i for i, turn in enumerate(self.turns) if turn in meant], len(self.speakers) - 1 in meant


class AnswerReasoning:
    """Follows the reasoning of an answer, after `prompt` tokens; `is_reasoning` is called with each of its tokens."""

    def __init__(self, is_reasoning: Callable[[int], bool], prompt: int) -> None:
        self._is_reasoning, self._prompt, self._known = is_reasoning, prompt, list[bool]()

    def add(self, token: int) -> None:
        """Add the next generated token."""
        self._known.append(self._is_reasoning(token))

    def has(self, is_reasoning: bool, position: int) -> bool:
        """Whether a generated token is reasoning, or is not; true while it is not known, and for the prompt's."""
        index = position - self._prompt
        return not 0 <= index < len(self._known) or self._known[index] == is_reasoning


@dataclass
class Layout:
    """A sequence as choices by text and by role see it.

    Attributes:
        ends: Returns the prompt's text and offsets.
        prompt: The number of prompt tokens.
        generates: Whether tokens are generated.
        turns: Returns the messages of a chat, None where they are not known; itself None if the prompt is no chat.
        follow: Follows another answer; returns None if the model's answers have no reasoning.
        parts: Follows the answer's reasoning; None before a choice depends on it.
    """

    ends: Ends
    prompt: int = 0
    generates: bool = False
    turns: Callable[[], Turns | None] | None = None
    follow: Callable[[], AnswerReasoning | None] = lambda: None
    parts: AnswerReasoning | None = None

    def spoken(self, choice: Role, field: str) -> Tokens:
        """The tokens that a choice by role means.

        Raises:
            RequestError: The sequence has no roles, or no such tokens; names the field.
        """
        if self.turns is None and choice != "answer":
            raise RequestError(NO_CHAT, field, "unknown_roles")
        turns = self.turns() if self.turns else Turns((), (), ("assistant",))
        if turns is None:
            raise RequestError(UNKNOWN, field, "unknown_roles")
        at, is_open = turns.chosen(choice)
        is_open, part = is_open and self.generates, None
        if is_open and not isinstance(choice, Spoken):
            self.parts = self.parts or self.follow()
            is_reasoning = choice == "reasoning"
            if self.parts is not None:
                part = functools.partial(self.parts.has, is_reasoning)
            is_open = part is not None or not is_reasoning
        if not at and not is_open:
            reason = f"no token is chosen; the last messages are of {', '.join(turns.speakers[-8:])}"
            if choice == "reasoning":
                reason = "the chat has no reasoning, and the model's answers have none: choose answer or generated"
            raise RequestError(reason if self.turns else NOTHING_GENERATED, field, "no_such_tokens")
        if not is_open:
            return Tokens.at(at)
        if at == list(range(self.prompt - len(at), self.prompt)):  # or none
            return Tokens(self.prompt - len(at), part=part)
        return Tokens(at[0], None, tuple(at), rest=self.prompt, part=part)


def is_role(choice: TokenChoice) -> TypeGuard[Role]:
    """Whether a choice is by role."""
    return isinstance(choice, Spoken) or choice in ("reasoning", "answer")


def placed(choice: TokenChoice, layout: Layout, field: str) -> TokenChoice | Tokens:
    """Convert a choice by text or role to positions; others are unchanged.

    Args:
        choice: The choice.
        layout: The sequence.
        field: The field to name in errors.

    Raises:
        RequestError: The prompt has no such text, or the sequence no such tokens.
    """
    if is_role(choice):
        return layout.spoken(choice, field)
    if not isinstance(choice, TextPiece):
        return choice
    text, offsets = layout.ends()
    begins = _found(text, choice)
    if not begins:
        raise RequestError(f"the prompt does not contain the text {choice.text!r}", f"{field}.text", "text_not_found")
    size, at, number = len(choice.text), list[int](), 0
    # Tokens within one character share its offset, and the last of them has the character. Both lists ascend.
    for i, (first, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        while number < len(begins) and begins[number] + size <= first:
            number += 1
        if number < len(begins) and end > begins[number]:
            at.append(i)
    return Positions(positions=at)


def _found(text: str, choice: TextPiece) -> list[int]:
    """The starts of a piece in a text."""
    if choice.which != "all":
        at = text.rfind(choice.text) if choice.which == "last" else text.find(choice.text)
        return [at] if at >= 0 else []
    return [match.start() for match in re.finditer(re.escape(choice.text), text)]
