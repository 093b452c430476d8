"""The replica's messages to the ingress; `job.py` has those to the replica."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from deployments.engine.request import StopReason
from deployments.readouts.spec import ReadoutRows

ENGINE_ENDED = "the replica's engine has ended and is replaced: try again"  # a refusal's message
NOT_TAKEN = "the replica's engine has ended, and has not begun this request: try again"  # a refusal's message, too

# One token in an answer, written once, because the ingress has no tokenizer and only passes it on.
Entry = dict[str, Any]


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


@dataclass
class Piece:
    """A part of one choice: text, reasoning, parts of tool calls, and the tokens since the last piece.

    Attributes:
        index: The choice's index in the job.
        text: Text of the answer.
        reasoning: Text of the reasoning.
        tool_calls: Parts of tool calls.
        logprobs: Each token as an entry of a chat's `logprobs.content`, and the characters of the text before it. The
            first token of a repeated prompt has no logprob.
        token_ids: The tokens' ids, if requested.
        prompt_ids: In the choice's first message, the prompt's token ids, if requested.
        lens: Entries of `logit_lens.content`; None if the job requests no lens.
        readouts: Rows of readouts.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[CallPart] = field(default_factory=list)
    logprobs: list[tuple[Entry, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    lens: list[Entry] | None = None
    readouts: list[ReadoutRows] = field(default_factory=list)


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
    """The last message of one choice.

    Attributes:
        piece: What no earlier message has; all of an answer that is not streamed.
        finish_reason: Why it ended, in OpenAI's words.
        prompt_tokens: Tokens of its prompt.
        completion_tokens: Generated tokens.
        run: Its activations, if they are recorded.
        prompt_lens: Entries of `logit_lens.prompt`.
        norms: The norms that interventions have used as their unit.
        likeliness: The mean logprob of its tokens, if the job ranks its choices.
        edits: What gated and reported interventions did.
        stop_reason: The row that ended it, if `stop_when` did.
        cached_tokens: Tokens of the prompt that were reused from an earlier request.
    """

    piece: Piece
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    run: RunReport | None = None
    prompt_lens: Sequence[Entry] = ()
    norms: tuple[ChangedNorm, ...] = ()
    likeliness: float = 0.0
    edits: tuple[EditReport, ...] = ()
    stop_reason: StopReason | None = None
    cached_tokens: int = 0

    @property
    def index(self) -> int:
        """The choice's index in the job."""
        return self.piece.index


@dataclass(frozen=True)
class Refusal:
    """Why the whole job failed or was rejected; its last message."""

    message: str
    field: str | None = None
    code: str = "invalid_value"
    status: int = 400


Message = Piece | End | Refusal
