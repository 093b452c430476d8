"""What the ingress and a replica say to each other: small typed messages."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from deployments.activations.accounts import OPERATOR, Account
from deployments.engine.request import Sampling, StopReason
from deployments.errors import RequestError
from deployments.points.capture import Capture
from deployments.points.interventions import Intervention
from deployments.points.logit_lens import LogitLens
from deployments.points.readouts import AskedReadout, Condition

ENGINE_ENDED = "the replica's engine has ended; another takes its place: try again"  # a refusal's message


@dataclass(frozen=True)
class Job:
    """One HTTP request, validated.

    Attributes:
        id: A unique id; the runs it makes are named after it.
        account: Who sends it.
        messages: A chat, in OpenAI's form; None for a completion.
        prompts: A completion's prompts, each text or token ids; empty for a chat.
        tools: OpenAI's tool definitions that the model may call.
        must_call: Names of functions of which it must call one; where it is empty, it need not.
        parallel_calls: Whether it may make several calls.
        schema: JSON schema that its text obeys; None where any text will do.
        template_kwargs: What the chat template is told besides.
        n: Choices per prompt.
        max_tokens: New tokens at most; None for what the context leaves.
        sampling: How tokens are drawn.
        stop: Strings that end a text.
        stop_token_ids: Token ids that end a text.
        ignore_eos: Generate on behind the model's end tokens.
        logprobs: With each token say its logprob and those of so many likeliest tokens; None for neither.
        echo: Begin each text with its prompt, and its logprobs with the prompt's, where they are asked for.
        ranked: Say with each choice how likely it was, for the best to be picked.
        token_ids: Say the token ids of prompt and answer.
        capture: What to record; None for nothing.
        interventions: What to change on the way; the first ones are the profile's.
        variants: What to change besides in each choice, `n` of them; empty where all are alike.
        logit_lens: What to say of the layers with each token; None for nothing.
        readouts: Readouts whose values it wants.
        stop_when: The condition on them that ends an answer; None for none.
        report: Whether to say what each intervention did.
        profile: The profile that it uses; None for none.
        profiled: How many of its interventions are the profile's.
        profile_account: Who may read what these name: an admin, where the profile is a default.
        profile_captures: Whether what to record is the profile's, too.
        default_capture: What to record in place of `capture` where the model has no savepoints: the profile's.
        session_id: The session its runs join.
        run_ids: Names of its runs, one for each choice; empty where they are named after the job.
        fence: What the store gave when it admitted the job to the session; None without keys.
        unstorable: Why its runs cannot be stored, where that is known before.
        request_id: What the client and the HTTP log call the request; not unique.
        created: When it came, in Unix seconds.
        fields: What the request calls a field that a refusal may name, where it is not that name.
    """

    id: str
    account: Account = OPERATOR
    messages: list[dict[str, Any]] | None = None
    prompts: list[str | Sequence[int]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    must_call: tuple[str, ...] = ()
    parallel_calls: bool = True
    schema: dict[str, Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    ranked: bool = False
    token_ids: bool = False
    capture: Capture | None = None
    interventions: tuple[Intervention, ...] = ()
    variants: tuple[tuple[Intervention, ...], ...] = ()
    logit_lens: LogitLens | None = None
    readouts: tuple[AskedReadout, ...] = ()
    stop_when: Condition | None = None
    report: bool = False
    profile: str | None = None
    profiled: int = 0
    profile_account: Account = OPERATOR
    profile_captures: bool = False
    default_capture: Capture | None = None
    session_id: str = ""
    run_ids: tuple[str, ...] = ()
    fence: str | None = None
    unstorable: str | None = None
    request_id: str = ""
    created: float = field(default_factory=time.time)
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def may_store(self) -> bool:
        """Whether it may store what it records."""
        return any(capture and capture.destination != "inline" for capture in (self.capture, self.default_capture))

    def changes(self, number: int) -> dict[str, Intervention]:
        """What is changed in one of a prompt's choices, by the request's fields."""
        return _fields("interventions", self.interventions) | (
            _fields(f"variants[{number}]", self.variants[number]) if self.variants else {}
        )

    @property
    def all_changes(self) -> dict[str, Intervention]:
        """What is changed in any of its choices, by the request's fields."""
        found = _fields("interventions", self.interventions)
        for number, variant in enumerate(self.variants):
            found |= _fields(f"variants[{number}]", variant)
        return found

    @property
    def conditions(self) -> dict[str, Condition]:
        """Conditions on readouts, by the request's fields."""
        found = {f"{field}.when": spec.when for field, spec in self.all_changes.items() if spec.when is not None}
        return found | ({} if self.stop_when is None else {"stop_when": self.stop_when})

    def reader(self, field: str) -> Account:
        """Who may read what the intervention of this field names."""
        listed = re.fullmatch(r"interventions\[(\d+)\]", field)
        return self.profile_account if listed and int(listed[1]) < self.profiled else self.account

    def refusal(self, error: RequestError) -> Refusal:
        """Why it cannot be served, by the fields of its request."""
        message, name = error.message, self.fields.get(error.field or "", error.field)
        listed = re.match(r"interventions\[(\d+)\]", name or "")
        number = int(listed[1]) - self.profiled if listed else 0
        if number < 0 or (self.profile_captures and re.match(r"capture\b", name or "")):
            message, name = f"the profile {self.profile!r}, {name}: {message}", "intervention_profile"
        elif listed:
            name = f"interventions[{number}]{(name or '')[listed.end() :]}"
        return Refusal(message, name, error.code, error.status)


def _fields(name: str, specs: Sequence[Intervention]) -> dict[str, Intervention]:
    return {f"{name}[{i}]": spec for i, spec in enumerate(specs)}


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
        targets: (token id, token, logprob, rank) of the tokens that were asked for.
    """

    layer: int
    top: tuple[tuple[int, TokenText, float], ...]
    targets: tuple[tuple[int, TokenText, float, int], ...] = ()


class TokenLayers(NamedTuple):
    """A token and the top tokens of some layers: of an answer at the position that predicts it, of a prompt at its own.

    Attributes:
        token: Its id.
        spelled: The token itself.
        layers: Those asked for, in their order.
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
        labels: What its values are of, where it says so.
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
class Text:
    """What is to be written as tokens: a prompt, or a chat by the model's template.

    Attributes:
        prompt: The prompt; None for a chat.
        messages: The chat, in OpenAI's form.
        tools: OpenAI's tool definitions that the template shows.
        template_kwargs: What the template is told besides.
        add_special_tokens: Let the tokenizer add those with which it begins or ends a text.
        add_generation_prompt: Let the template end a chat where an answer begins.
        strings: Give each token as its vocabulary writes it, too.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    strings: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why the whole job came to nothing; its last message."""

    message: str
    field: str | None = None
    code: str = "invalid_value"
    status: int = 400


Message = Piece | End | Refusal
