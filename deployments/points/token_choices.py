"""Choices of tokens, defined once for captures, interventions, stored rows, data sets and commands.

Positions count the tokens of prompt + generated, from 0.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError, model_validator

from deployments.errors import RequestError
from deployments.points.strict import Strict
from vitrine.points import ROLES as ROLES

Name = Literal["all", "prompt", "generated", "last", "prompt_last", "generated_last", "reasoning", "answer"]
NAMES = get_args(Name)
Speaker = Literal["system", "user", "assistant", "tool"]
ASSISTANT, TEMPLATE, REASONING = map(ROLES.index, ("assistant", "template", "reasoning"))
FORMS = (
    ", ".join(NAMES) + ', {"last": k}, {"prompt_last": k}, {"positions": [...]}, {"from": a}, '
    '{"from": a, "to": b}, {"role": "user"}, {"turn": k}, {"role": "user", "turn": k} or '
    '{"text": "...", "which": "last", "first" or "all"}'
)

MOST_POSITIONS = 65536
NOTHING_GENERATED = "no token is generated: choose prompt_last, prompt or positions"
AMBIGUOUS = (
    "the last token is not known before the answer ends: choose prompt_last or "
    '{"prompt_last": k} for the prompt\'s, generated for the whole answer'
)


class TokensError(ValueError):
    """A text that is not a choice of tokens."""


class _Choice(Strict):
    model_config = ConfigDict(frozen=True)


class Last(_Choice):
    """The last `last` tokens of prompt + generated."""

    last: int = Field(ge=1)


class PromptLast(_Choice):
    """The last `prompt_last` tokens of the prompt."""

    prompt_last: int = Field(ge=1)


class Positions(_Choice):
    """Tokens at these positions, counted from 0 over prompt and answer."""

    positions: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, max_length=MOST_POSITIONS, fail_fast=True)


class Window(_Choice):
    """The tokens from the position `from` to before `to`, or to the end."""

    start: int = Field(ge=0, alias="from")
    to: int | None = None

    @model_validator(mode="after")
    def _has_a_size(self) -> Window:
        if self.to is not None and not self.start < self.to <= self.start + MOST_POSITIONS:
            raise ValueError(f"`to` must exceed `from` by 1 to {MOST_POSITIONS}")
        return self


class TextPiece(_Choice):
    """The tokens of the prompt that contain any character of this text."""

    text: str = Field(min_length=1, max_length=4096)
    which: Literal["last", "first", "all"] = "last"


class Spoken(_Choice):
    """The tokens of messages with this role, of the message `turn`, or of the message `turn` of those with the role."""

    role: Speaker | None = None
    turn: int | None = None  # from 0; negative from the end

    @model_validator(mode="after")
    def _names_some(self) -> Spoken:
        if self.role is None and self.turn is None:
            raise ValueError("give role, turn or both")
        return self


# Distinguished by a field that no other kind has.
_KINDS: dict[str, type[_Choice]] = {
    "last": Last,
    "prompt_last": PromptLast,
    "positions": Positions,
    "from": Window,
    "start": Window,  # the field of `from`
    "text": TextPiece,
    "role": Spoken,
    "turn": Spoken,
}


def _tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "tokens:name" if value in NAMES else None
    names = value if isinstance(value, dict) else vars(value) if isinstance(value, _Choice) else ()
    return next((f"tokens:{kind.__name__}" for name, kind in _KINDS.items() if name in names), None)


TokenChoice = Annotated[
    Annotated[Name, Tag("tokens:name")]
    | Annotated[Last, Tag("tokens:Last")]
    | Annotated[PromptLast, Tag("tokens:PromptLast")]
    | Annotated[Positions, Tag("tokens:Positions")]
    | Annotated[Window, Tag("tokens:Window")]
    | Annotated[TextPiece, Tag("tokens:TextPiece")]
    | Annotated[Spoken, Tag("tokens:Spoken")],
    Discriminator(_tag, custom_error_type="unknown_tokens", custom_error_message=f"tokens are {FORMS}"),
]


class Tokens(NamedTuple):
    """Tokens by their positions: a range, or a few.

    Attributes:
        first: The first position.
        stop: The position after the last; None for an open end.
        few: Their positions, ascending, if they are not a range; `first` and `stop` then enclose them.
        tail: Choose only the last `tail` of these, which are known at the end; None for all.
        rest: With `few`, all from this position on belong to them as well.
        part: Whether the token at a position belongs to them; true while the token is not known.
    """

    first: int = 0
    stop: int | None = None
    few: tuple[int, ...] | None = None
    tail: int | None = None
    rest: int | None = None
    part: Callable[[int], bool] | None = None

    @classmethod
    def at(cls, positions: Sequence[int]) -> Tokens:
        """Those at some positions, ascending and at least one."""
        first, stop = positions[0], positions[-1] + 1
        return cls(first, stop, None if len(positions) == stop - first else tuple(positions))

    def within(self, start: int, stop: int) -> Sequence[int]:
        """Those from `start` to before `stop`, whatever `tail` is."""
        chosen: Sequence[int] = range(max(start, self.first), min(stop, stop if self.stop is None else self.stop))
        if self.few is not None:
            chosen = self.few[bisect_left(self.few, start) : bisect_left(self.few, stop)]
            if self.rest is not None:
                chosen = (*chosen, *range(max(start, self.rest), stop))
        return chosen if self.part is None else tuple(filter(self.part, chosen))

    def of(self, total: int) -> Sequence[int]:
        """All of them in a sequence of `total` tokens."""
        positions = self.within(0, total)
        return positions[-self.tail :] if self.tail else positions

    def turn(self, position: int) -> int:
        """The index of a position among them."""
        if self.rest is not None or self.part is not None:
            return len(self.within(0, position))
        return position - self.first if self.few is None else bisect_left(self.few, position)

    def next_bound(self, position: int) -> int:
        """A position up to which tokens are chosen, or not, as the one at this position is."""
        last = sys.maxsize if self.stop is None else self.stop
        end_of_few = last if self.rest is None else self.rest
        if self.part is not None or (self.few is not None and position < end_of_few):
            return position + 1
        return next((bound for bound in (self.first, last) if bound > position), sys.maxsize)


def resolve(choice: TokenChoice | Tokens, prompt: int, field: str) -> Tokens:
    """Resolve a choice in a sequence with `prompt` prompt tokens; by text or role it must be `placed` before.

    Raises:
        RequestError: The prompt is shorter; names the field.
    """
    if isinstance(choice, Tokens):
        return choice
    if isinstance(choice, PromptLast):
        if choice.prompt_last > prompt:
            raise RequestError(f"the prompt has {prompt} tokens", field)
        return Tokens(prompt - choice.prompt_last, prompt)
    if isinstance(choice, Last):
        return Tokens(tail=choice.last)
    if isinstance(choice, Positions):
        return Tokens.at(sorted(set(choice.positions)))
    if isinstance(choice, Window):
        return Tokens(choice.start, choice.to)
    assert isinstance(choice, str), "a piece of text has positions once it is placed"
    return {
        "all": Tokens(),
        "prompt": Tokens(0, prompt),
        "generated": Tokens(prompt),
        "last": Tokens(tail=1),
        "prompt_last": Tokens(prompt - 1, prompt),
        "generated_last": Tokens(prompt, tail=1),
    }[choice]


def resolve_ahead(choice: TokenChoice | Tokens, prompt: int, most: int, field: str) -> Tokens:
    """As `resolve`, before a sequence of at most `most` tokens runs: no token may depend on the sequence's end.

    Raises:
        RequestError: They are the last ones, and tokens are generated; or the prompt is too short. It names the field.
    """
    tokens = resolve(choice, prompt, field)
    if choice in ("generated", "generated_last") and most == prompt:
        raise RequestError(NOTHING_GENERATED, field, "no_such_tokens")
    if not tokens.tail:
        return tokens
    if most > prompt:
        raise RequestError(AMBIGUOUS, field, "ambiguous_tokens")
    return Tokens(prompt - min(tokens.tail, prompt - tokens.first), prompt)


def farthest(choice: TokenChoice | Tokens) -> int:
    """The highest position that a placed choice names, which a sequence must have; -1 if it names none."""
    if isinstance(choice, Window):
        return choice.start if choice.to is None else choice.to - 1
    return max(choice.positions) if isinstance(choice, Positions) else -1


WORDS = (
    f"{', '.join(NAMES)}, last:K, prompt_last:K, positions:K,K,..., from:A, from:A,to:B, role:ROLE, turn:K, "
    "role:ROLE:K or text:WORDS"
)
_ADAPTER: TypeAdapter[Any] = TypeAdapter(TokenChoice)


def parse(text: str) -> Any:
    """Parse a command's option: `prompt_last`, `last:3`, `positions:0,5`, `from:0,to:64`, `text:France`.

    Raises:
        TokensError: It is invalid; the message lists the forms.
    """
    kind, colon, rest = text.partition(":")
    value: Any = text
    if colon and kind in ("last", "prompt_last") and rest.isdecimal():
        value = {kind: int(rest)}
    elif colon and kind == "positions":
        parts = rest.split(",")
        value = {kind: [int(part) if part.strip().isdecimal() else part for part in parts]}
    elif window := re.fullmatch(r"from:([0-9]+)(?:,to:([0-9]+))?", text):
        value = {"from": int(window[1])} | ({"to": int(window[2])} if window[2] else {})
    elif spoken := re.fullmatch(r"(?:role:([a-z]+)|turn)(?::(-?[0-9]+))?", text):
        value = {"role": spoken[1], "turn": spoken[2] and int(spoken[2])}
    elif colon and kind == "text":
        value = {kind: rest}
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        raise TokensError(f"{text!r} is not a choice of tokens: use {WORDS}") from error


def check(value: Any) -> TokenChoice:
    """Validate a choice from a request, or one that was parsed.

    Raises:
        TokensError: It is invalid; the message lists the forms.
    """
    try:
        return _ADAPTER.validate_python(value)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise TokensError(f"tokens: {value!r} is none of {FORMS}") from error


def as_json(text: str) -> Any:
    """Convert an option for `parse` to the JSON of a request's body.

    Raises:
        TokensError: It is not a choice of tokens.
    """
    return _ADAPTER.dump_python(parse(text), mode="json", by_alias=True, exclude_none=True)
