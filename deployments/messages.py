"""What a replica sends back to the ingress: small typed messages. `job.py` has what the ingress sends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from deployments.engine.request import StopReason

ENGINE_ENDED = "the replica's engine has ended and is replaced: try again"  # a refusal's message


class TokenText(NamedTuple):
    r"""One token as written.

    Attributes:
        text: Its text, with bytes that are no whole character as `\xe2`.
        raw: Its bytes, which joined to its neighbours' are the answer's UTF-8; None where it adds nothing.
    """

    text: str
    raw: bytes | None


class ScoredToken(NamedTuple):
    """A token and how likely the model held it; `text` and `raw` as in `TokenText`.

    The first token of a prompt has no `logprob`: nothing stands before it.
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
    """What one layer's output leads to.

    Attributes:
        layer: Which, from 0.
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


@dataclass(frozen=True)
class ReadoutValues:
    """Rows of a readout, all of the prompt's tokens or all of generated ones.

    Attributes:
        name: The readout.
        labels: The labels of its values, if it has any.
        generated: Whether they are of generated tokens.
        index: Of each row's token, among the prompt's or the generated ones.
        values: Of each row; of an autoencoder those of `features`.
        features: Of each row the features, the largest first; None of a linear readout.
    """

    name: str
    labels: tuple[str, ...] | None
    generated: bool
    index: list[int]
    values: list[list[float]]
    features: list[list[int]] | None = None


class CallPart(NamedTuple):
    """More of a tool call: first its id and name, then text of its arguments, which join to JSON.

    Attributes:
        number: Which of the choice's calls it is.
        arguments: Text of its arguments.
        id: The call's id; of its first part alone, as `name`.
        name: The function.
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
    """More of one choice: text, thoughts, parts of tool calls, and the tokens read since the last piece.

    A choice's first message has `prompt_ids`, where the job asks for token ids; `lens` is None where it asks for none.
    """

    index: int
    text: str = ""
    tool_calls: tuple[CallPart, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    lens: tuple[TokenLayers, ...] | None = None
    reasoning: str = ""
    readouts: tuple[ReadoutValues, ...] = ()


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
        node: The node on whose disk it lies, where nodes keep directories of their own.
    """

    run_id: str
    session_id: str
    status: str
    tokens: int
    prompt_tokens: int
    points: dict[str, dict[str, Any]] = field(default_factory=dict)
    reason: str | None = None
    node: str | None = None


class ChangedNorm(NamedTuple):
    """The mean norm of the rows that an intervention in its units has changed.

    Attributes:
        param: The intervention's field.
        point: Where.
        norm: Before the change.
    """

    param: str
    point: str
    norm: float


class EditReport(NamedTuple):
    """What an intervention did at a point; rows and norms where the request asks for a report.

    Attributes:
        param: The intervention's field.
        point: Where.
        lag: How many rows its gate acts behind what it reads; None where it has none.
        rows: How many rows it changed.
        kept: How many its gate kept as they were.
        mean_change: Of the norms of its changes, each relative to its row's.
        largest_change: The largest of them.
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
    """The last message of one choice; `logprobs`, `token_ids` and `lens` are of tokens read since the last piece.

    Where the job asks for them, `prompt_lens` is what layers make of the prompt, and `likeliness` the mean of its
    tokens' logprobs. `cached_tokens` of the prompt were run for an earlier request.
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
    readouts: tuple[ReadoutValues, ...] = ()
    edits: tuple[EditReport, ...] = ()
    stop_reason: StopReason | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Refusal:
    """Why the whole job came to nothing; its last message."""

    message: str
    field: str | None = None
    code: str = "invalid_value"
    status: int = 400


Message = Piece | End | Refusal
