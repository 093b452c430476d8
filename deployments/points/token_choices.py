"""Choices of tokens, defined once for captures, interventions, stored rows, data sets and commands.

Positions count the tokens of prompt + generated, from 0.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError, model_validator

from deployments.errors import RequestError
from deployments.points.strict import Strict

Name = Literal["all", "prompt", "generated", "last", "prompt_last", "generated_last"]
NAMES = get_args(Name)
FORMS = (
    ", ".join(NAMES) + ', {"last": k}, {"prompt_last": k}, {"positions": [...]}, {"from": a}, '
    '{"from": a, "to": b} or {"text": "...", "which": "last", "first" or "all"}'
)

# Returns a prompt's text with special tokens, and the number of characters before each token and after the last.
Ends = Callable[[], tuple[str, Sequence[int]]]
MOST_POSITIONS = 65536
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


# Distinguished by a field that no other kind has.
_KINDS: dict[str, type[_Choice]] = {
    "last": Last,
    "prompt_last": PromptLast,
    "positions": Positions,
    "from": Window,
    "start": Window,  # the field of `from`
    "text": TextPiece,
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
    | Annotated[TextPiece, Tag("tokens:TextPiece")],
    Discriminator(_tag, custom_error_type="unknown_tokens", custom_error_message=f"tokens are {FORMS}"),
]


class Tokens(NamedTuple):
    """Tokens by their positions: a range, or a few.

    Attributes:
        first: The first position.
        stop: The position after the last; None for an open end.
        few: Their positions, ascending, if they are not a range; `first` and `stop` then enclose them.
        tail: Choose only the last `tail` of these, which are known at the end; None for all.
    """

    first: int = 0
    stop: int | None = None
    few: tuple[int, ...] | None = None
    tail: int | None = None

    @property
    def apart(self) -> bool:
        """Whether they are neither a prefix nor a suffix of the sequence or its answer."""
        return self.few is not None or (self.stop is not None and self.first > 0)

    def within(self, start: int, stop: int) -> Sequence[int]:
        """Those from `start` to before `stop`, whatever `tail` is."""
        if self.few is not None:
            return self.few[bisect_left(self.few, start) : bisect_left(self.few, stop)]
        return range(max(start, self.first), min(stop, stop if self.stop is None else self.stop))

    def of(self, total: int) -> Sequence[int]:
        """All of them in a sequence of `total` tokens."""
        positions = self.within(0, total)
        return positions[-self.tail :] if self.tail else positions

    def turn(self, position: int) -> int:
        """The index of a position among them."""
        return position - self.first if self.few is None else bisect_left(self.few, position)


def resolve(choice: TokenChoice, prompt: int, field: str) -> Tokens:
    """Resolve a choice in a sequence with `prompt` prompt tokens; a `text` must be `placed` before.

    Raises:
        RequestError: The prompt is shorter; names the field.
    """
    if isinstance(choice, PromptLast):
        if choice.prompt_last > prompt:
            raise RequestError(f"the prompt has {prompt} tokens", field)
        return Tokens(prompt - choice.prompt_last, prompt)
    if isinstance(choice, Last):
        return Tokens(tail=choice.last)
    if isinstance(choice, Positions):
        few = tuple(sorted(set(choice.positions)))
        return Tokens(few[0], few[-1] + 1, None if len(few) == few[-1] + 1 - few[0] else few)
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


def resolve_ahead(choice: TokenChoice, prompt: int, most: int, field: str) -> Tokens:
    """As `resolve`, before a sequence of at most `most` tokens runs: no token may depend on the sequence's end.

    Raises:
        RequestError: They are the last ones, and tokens are generated; or the prompt is too short. It names the field.
    """
    tokens = resolve(choice, prompt, field)
    if choice in ("generated", "generated_last") and most == prompt:
        raise RequestError("no token is generated: choose prompt_last, prompt or positions", field, "no_such_tokens")
    if not tokens.tail:
        return tokens
    if most > prompt:
        raise RequestError(AMBIGUOUS, field, "ambiguous_tokens")
    return Tokens(prompt - min(tokens.tail, prompt - tokens.first), prompt)


def farthest(choice: TokenChoice) -> int:
    """The highest position that a placed choice names, which a sequence must have; -1 if it names none."""
    if isinstance(choice, Window):
        return choice.start if choice.to is None else choice.to - 1
    return max(choice.positions) if isinstance(choice, Positions) else -1


def placed(choice: TokenChoice, ends: Ends, field: str) -> TokenChoice:
    """Convert a choice by `text` to positions; others are unchanged.

    Args:
        choice: The choice.
        ends: Text and offsets of the prompt.
        field: The field to name in errors.

    Raises:
        RequestError: The prompt has no such text.
    """
    if not isinstance(choice, TextPiece):
        return choice
    text, offsets = ends()
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


WORDS = f"{', '.join(NAMES)}, last:K, prompt_last:K, positions:K,K,..., from:A, from:A,to:B or text:WORDS"
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
