"""The replica's messages to the ingress; `job.py` has those to the replica."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from deployments.engine.request import StopReason
from deployments.readouts.spec import ReadoutRows

ENGINE_ENDED = "the replica's engine has ended and is replaced: try again"  # a refusal's message
NOT_TAKEN = "the replica's engine has ended, and has not begun this request: try again"  # a refusal's message, too


class TokenText(NamedTuple):
    r"""One token as written.

    Attributes:
        text: Its text; bytes that are not a whole character are written as `\xe2`.
        raw: Its bytes; those of all tokens join to the answer's UTF-8. None if it adds no text.
    """

    text: str
    raw: bytes | None


class ScoredToken(NamedTuple):
    """A token and its logprob; `text` and `raw` as in `TokenText`.

    The first token of a prompt has no `logprob`, because no token precedes it.
    """

    text: str
    raw: bytes | None
    logprob: float | None


class TokenLogprob(NamedTuple):
    """One token of an answer, or of a prompt that is repeated.

    Attributes:
        chosen: The token itself.
        top: The likeliest tokens in its place, likeliest first.
        offset: Characters of the text before it.
    """

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]
    offset: int


class LayerTop(NamedTuple):
    """The logit lens of one layer's output.

    Attributes:
        layer: The layer, from 0.
        top: (token id, token, logprob) of the likeliest tokens, likeliest first. Plain tuples: there are many.
        targets: (token id, token, logprob, rank) of the requested tokens.
    """

    layer: int
    top: tuple[tuple[int, TokenText, float], ...]
    targets: tuple[tuple[int, TokenText, float, int], ...] = ()


class TokenLayers(NamedTuple):
    """A token and the top tokens of some layers: of an answer at the position that predicts it, of a prompt at its own.

    Attributes:
        token: Its id.
        spelled: The token itself.
        layers: Those requested, in their order.
        position: Of a prompt's token.
    """

    token: int
    spelled: TokenText
    layers: tuple[LayerTop, ...]
    position: int | None = None


class CallPart(NamedTuple):
    """A part of a tool call: the first has its id and name, the others text of its arguments, which join to JSON.

    Attributes:
        number: The call's index in the choice.
        arguments: Text of its arguments.
        id: The call's id, only in the first part.
        name: The function, only in the first part.
    """

    number: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


def whole_calls(parts: Iterable[CallPart]) -> list[CallPart]:
    """Each call in one part."""
    calls = [list(run) for _, run in groupby(parts, key=lambda part: part.number)]
    return [run[0]._replace(arguments="".join(part.arguments for part in run)) for run in calls]


@dataclass(frozen=True)
class Piece:
    """A part of one choice: text, reasoning, parts of tool calls, and the tokens since the last piece.

    A choice's first message has `prompt_ids` if the job asks for token ids; `lens` is None if it asks for none.
    """

    index: int
    text: str = ""
    tool_calls: tuple[CallPart, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    lens: tuple[TokenLayers, ...] | None = None
    reasoning: str = ""
    readouts: tuple[ReadoutRows, ...] = ()


@dataclass(frozen=True)
class RunReport:
    """The state of one choice's activations; its fields are those of the HTTP answer.

    Attributes:
        run_id: The run's name.
        session_id: Its session.
        status: `stored`, `inline` or `failed`.
        tokens: Tokens of prompt and answer.
        prompt_tokens: Tokens of the prompt.
        points: By name: where the rows are stored, or, inline, the rows. Empty with `"return": "id"`, or if it failed.
        reason: Why it failed.
    """

    run_id: str
    session_id: str
    status: str
    tokens: int
    prompt_tokens: int
    points: dict[str, dict[str, Any]] = field(default_factory=dict)
    reason: str | None = None


class ChangedNorm(NamedTuple):
    """The norm of the rows that an intervention in units of `residual_norm` has changed.

    Attributes:
        param: The intervention's field.
        point: The point's name.
        norm: The rows' median norm before the change.
        outliers: How many of the rows had a norm of at least ten times the median.
    """

    param: str
    point: str
    norm: float
    outliers: int = 0


class EditReport(NamedTuple):
    """What an intervention did at a point; rows and norms only if the request asks for a report.

    Attributes:
        param: The intervention's field.
        point: The point's name.
        lag: 1 if its gate acts on the row after the one read, 0 if on the same; None without a gate.
        rows: How many rows it changed.
        kept: How many rows its gate left unchanged.
        mean_change: The mean norm of its changes, each relative to its row's norm.
        largest_change: The largest of these norms.
    """

    param: str
    point: str
    lag: int | None = None
    rows: int | None = None
    kept: int | None = None
    mean_change: float | None = None
    largest_change: float | None = None


@dataclass(frozen=True)
class End:
    """The last message of one choice; `logprobs`, `token_ids` and `lens` are for the tokens since the last piece.

    If the job asks for them, `prompt_lens` is the logit lens of the prompt, and `likeliness` the mean logprob of the
    choice's tokens. `cached_tokens` of the prompt were reused from an earlier request.
    """

    index: int
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    run: RunReport | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    lens: tuple[TokenLayers, ...] | None = None
    prompt_lens: tuple[TokenLayers, ...] = ()
    norms: tuple[ChangedNorm, ...] = ()
    likeliness: float = 0.0
    readouts: tuple[ReadoutRows, ...] = ()
    edits: tuple[EditReport, ...] = ()
    stop_reason: StopReason | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Refusal:
    """Why the whole job failed or was rejected; its last message."""

    message: str
    field: str | None = None
    code: str = "invalid_value"
    status: int = 400


Message = Piece | End | Refusal
