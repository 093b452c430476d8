"""What the ingress and a replica say to each other: small typed messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deployments.activations.spec import Capture
from deployments.engine.request import Sampling


@dataclass(frozen=True)
class Job:
    """One HTTP request, validated.

    Attributes:
        id: The request's id; the runs it makes are named after it.
        messages: A chat, in OpenAI's form; None for a completion.
        prompts: A completion's prompts, each text or token ids; empty for a chat.
        tools: OpenAI's tool definitions that the model may call.
        n: Choices per prompt.
        max_tokens: New tokens at most; None for what the context leaves.
        sampling: How tokens are drawn.
        stop: Strings that end a text.
        stop_token_ids: Token ids that end a text.
        ignore_eos: Generate on behind the model's end tokens.
        logprobs: With each token say its logprob and those of so many likeliest tokens; None for neither.
        capture: What to record; None for nothing.
        session_id: The session its runs join.
        fields: What the request calls a field that a refusal may name, where it is not that name.
    """

    id: str
    messages: list[dict[str, Any]] | None = None
    prompts: list[str | list[int]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    n: int = 1
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    capture: Capture | None = None
    session_id: str = ""
    fields: dict[str, str] = field(default_factory=dict)


class Scored(NamedTuple):
    """A token and how likely the model held it; `text` and `raw` as in `spelling.Spelled`."""

    text: str
    raw: bytes | None
    logprob: float


class TokenLogprob(NamedTuple):
    """One generated token.

    Attributes:
        chosen: The token itself.
        top: The likeliest tokens in its place, likeliest first.
        offset: Characters of the text before it.
    """

    chosen: Scored
    top: tuple[Scored, ...]
    offset: int


@dataclass(frozen=True)
class Piece:
    """More of one choice: text, tool calls that are complete, or both, and the tokens read since the last piece."""

    index: int
    text: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class RunReport:
    """What became of one choice's activations; its fields are the HTTP answer's.

    Attributes:
        run_id: The run's name.
        session_id: Its session.
        status: `stored`, `inline` or `failed`.
        tokens: Tokens of prompt and answer.
        prompt_tokens: Tokens of the prompt.
        points: By name: where the rows lie, or, inline, the rows.
        reason: Why it failed.
    """

    run_id: str
    session_id: str
    status: str
    tokens: int
    prompt_tokens: int
    points: dict[str, dict[str, Any]] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class End:
    """The last message of one choice; `logprobs` are of tokens read since the last piece."""

    index: int
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    run: RunReport | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Why the whole job came to nothing; its last message."""

    message: str
    field: str | None = None
    code: str = "invalid_value"
    status: int = 400


Message = Piece | End | Refusal
