"""Requests to the engine and its events: small typed messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from deployments.points.capture import Capture
from deployments.points.logit_lens import MOST_LIKELIEST
from deployments.points.token_choices import Tokens

if TYPE_CHECKING:  # the HTTP face imports this module, and needs no torch
    import torch

    from deployments.engine.decoding.guided import Grammar
    from deployments.engine.edits import Edit
    from deployments.places.hook_site import HookSite, Point
    from deployments.points.patterns import Patterns
    from deployments.points.placement import AnswerReasoning
    from deployments.readouts.gates import Gate
    from deployments.readouts.monitors import MonitorSet
    from deployments.readouts.sequence import ResolvedReadout
    from deployments.readouts.spec import ReadoutRows
    from deployments.readouts.values import FittedLens

FinishReason = Literal["stop", "length", "cancelled", "error"]


MOST_LOGPROBS = MOST_LIKELIEST  # the most likely tokens that a request may ask for beside each token it gets
Likeliest = tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first; -inf for what is ruled out
GRAMMAR_TOO_COMPLEX = "grammar_too_complex"  # the code of a grammar that turned out so on the way


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; OpenAI's defaults. `sampling.py` says in which order this is applied.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: Draw from the smallest set of tokens whose probability reaches this.
        top_k: Draw from this many likeliest tokens; 0 for all.
        seed: Makes the draw repeatable.
        min_p: Draw from tokens whose probability is at least this fraction of the likeliest token's.
        repetition_penalty: Above 1, makes tokens of the prompt and the answer less likely; below 1, more likely.
        presence_penalty: Subtracted from the logits of tokens that occur in the answer.
        frequency_penalty: Subtracted from a token's logit for each time it occurs in the answer.
        logit_bias: Token id -> the number added to its logit.
        min_tokens: Nothing ends the text before this many tokens: no end token or stop token id is drawn, and a
            stop string is ordinary text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0


GREEDY = Sampling(temperature=0.0)


class LensLayers(NamedTuple):
    """A request for the logit lens: the final norm and head applied to the outputs of layers.

    Attributes:
        layers: The layers, from 0.
        points: Their outputs.
        top_k: How many top tokens of each layer to return.
        targets: Ids of tokens whose logprob and rank are returned as well.
        prompt: The prompt's tokens after which the lens is computed.
        generated: Whether it is computed for each new token as well.
        part: Whether the lens of the token at a position is returned; None for all.
        last: The last layer's output, if the target of each token is the top token of the last layer.
        fitted: The lens that the outputs pass first; None for none.
    """

    layers: tuple[int, ...]
    points: tuple[Point, ...]
    top_k: int
    targets: tuple[int, ...] = ()
    prompt: Tokens = Tokens(0, 0)
    generated: bool = True
    part: Callable[[int], bool] | None = None
    last: Point | None = None
    fitted: FittedLens | None = None


class LayerTokens(NamedTuple):
    """The logit lens of one layer's output: its top tokens, and (token id, logprob, rank from 1) of the lens's targets.

    Both are empty if the output is not finite.
    """

    top: Likeliest = ()
    targets: tuple[tuple[int, float, int], ...] = ()


class StopReason(NamedTuple):
    """The row that ended an answer: the readout, its value, the token's position, and the monitor if one ended it."""

    readout: str
    value: float
    token: int
    monitor: str | None = None


class Monitored(NamedTuple):
    """What a monitor has read in an answer.

    Attributes:
        name: The monitor.
        value: The largest value, for a condition `below` the smallest; None if no value is finite.
        position: The position of its row in prompt and answer.
        fired: The position of the first row that met the condition; None for none.
    """

    name: str
    value: float | None
    position: int | None
    fired: int | None


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Attributes:
        id: Unique among running requests.
        prompt: Token ids, at least one.
        max_tokens: The most new tokens; 0 runs the prompt through the model and generates nothing.
        sampling: How tokens are drawn.
        stop: Strings that end the text; they are not part of it.
        stop_token_ids: Token ids that end the text as the model's end tokens do: among the tokens, not in the text.
        ignore_eos: Continue after the model's end tokens.
        grammar: A grammar that the text must follow; None for any text.
        markers: Special tokens that appear in the text, with their spelling; others are left out.
        logprobs: Return each token's logprob, and those of this many top tokens; None for neither.
        prompt_logprobs: Return the same for the prompt's tokens, before the first new one; None for nothing.
        capture: What to record, with its points resolved; both or neither.
        points: The points that `capture` selects, in the order of execution.
        edits: Changes, applied in this order at each place, before recording.
        lens: The logit lens to return with each token; None for none.
        readouts: Readouts whose values are returned.
        stop_when: The answer ends before the token that would follow a row that met this; None for never.
        monitors: The operator's monitors; None for none.
        continues: Its text continues the prompt's, so that a space between them is part of it.
        streamed: Return what each step adds; otherwise everything comes with the end.
        parts: Follows the answer's reasoning; None if no choice of tokens depends on it.
        owner: Owners share the engine: of those that wait, the one with the fewest tokens so far comes next. A prefix's
            keys and values are shared only among requests of the same owner, because the number of reused tokens would
            reveal another owner's prompts.
    """

    id: str
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = field(default=None, hash=False)
    markers: Mapping[int, str] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    capture: Capture | None = None
    points: tuple[Point, ...] = ()
    edits: tuple[Edit, ...] = field(default=(), hash=False)
    lens: LensLayers | None = None
    readouts: tuple[ResolvedReadout, ...] = ()
    stop_when: Gate | None = field(default=None, hash=False)
    monitors: MonitorSet | None = None
    continues: bool = False
    streamed: bool = True
    parts: AnswerReasoning | None = field(default=None, hash=False)
    owner: str | None = None

    @property
    def places(self) -> set[HookSite]:
        """The places that it reads or changes, those of the logit lens left out."""
        places = {point.place for point in (*self.points, *(edit.point for edit in self.edits))}
        read = [*(readout.source for readout in self.readouts), *(gate.source for gate in self.gates)]
        return places | {source.place for source in read} | set(self.monitors.places if self.monitors else ())

    @property
    def gates(self) -> list[Gate]:
        """The conditions of its edits, and the one that ends its answer."""
        gates = [edit.gate for edit in self.edits if edit.gate]
        return [*gates, self.stop_when] if self.stop_when else gates


class Captured(NamedTuple):
    """The recorded rows of a request.

    Attributes:
        positions: [rows] index of each row's token in prompt + answer, ascending.
        token_ids: [rows] each row's token.
        values: Point name -> [rows, ...features], on the CPU; the rows of attention patterns grow.
        seen: The ids of all tokens, recorded or not, that follow the last rows handed out before.
    """

    positions: Sequence[int]
    token_ids: Sequence[int]
    values: dict[str, torch.Tensor | Patterns]
    seen: Sequence[int]

    @property
    def bytes(self) -> int:
        """Memory of the values."""
        return sum(value.nbytes for value in self.values.values())


class Rows(NamedTuple):
    """Rows that a request hands out before its end, in order; their consumer calls `Engine.written`."""

    id: str
    captured: Captured


class Logprob(NamedTuple):
    """A token's natural logarithm of probability and the likeliest tokens by the model itself.

    They are of the model's distribution before temperature, penalties and bias. `offset` characters precede the token.
    """

    logprob: float
    top: Likeliest
    offset: int = 0


class PromptLogprobs(NamedTuple):
    """The probability of each token of a request's prompt from the second on; their offsets have no meaning."""

    id: str
    logprobs: tuple[Logprob, ...]


class Delta(NamedTuple):
    """What one step added to a request.

    Attributes:
        id: The request.
        tokens: New tokens.
        text: New text, up to the last complete character.
        logprobs: One for each of `tokens`, if the request asks for them.
        lens: The logit lens for each of `tokens` and each layer of the request's lens.
        readouts: Rows of readouts computed since the last delta.
    """

    id: str
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[Logprob, ...] = ()
    lens: tuple[tuple[LayerTokens, ...], ...] = ()
    readouts: tuple[ReadoutRows, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Delta]) -> Delta:
        """Several of one request, one after the other, as one."""
        tokens = tuple(token for part in parts for token in part.tokens)
        logprobs = tuple(logprob for part in parts for logprob in part.logprobs)
        lens = tuple(layers for part in parts for layers in part.lens)
        return cls(parts[0].id, tokens, "".join(part.text for part in parts), logprobs, lens)


@dataclass
class MemoryUse:
    """Bytes held when a request was admitted, at most since, and when it had ended: of a GPU, else of this process."""

    before: int = 0
    peak: int = 0
    after: int = 0


@dataclass(frozen=True)
class Finished:
    """A request's last event.

    Attributes:
        id: The request.
        reason: Why it ended.
        prompt: Its prompt's token ids.
        tokens: All generated token ids, an end token included.
        captured: Recorded rows that were not handed out before, if capture was requested and the request was not
            cut off.
        error: What went wrong, for `reason` "error"; or why there is nothing captured.
        code: A stable word for the error.
        rest: What no earlier `Delta` contained.
        prompt_lens: The lens at the prompt's chosen positions, ascending: each position, with each layer's result.
        cached: Tokens of the prompt that were reused from an earlier request with the same prefix.
        memory: The memory held while it ran.
        readouts: Rows of readouts that no earlier `Delta` contained.
        stop_reason: The row that ended it, if its `stop_when` or a monitor did.
        monitored: What the monitors have read.
    """

    id: str
    reason: FinishReason
    prompt: Sequence[int]
    tokens: Sequence[int] = field(default_factory=tuple)
    captured: Captured | None = None
    error: str | None = None
    code: str = "engine_error"
    memory: MemoryUse = field(default_factory=MemoryUse)
    rest: Delta | None = None
    prompt_lens: tuple[tuple[int, tuple[LayerTokens, ...]], ...] = ()
    readouts: tuple[ReadoutRows, ...] = ()
    stop_reason: StopReason | None = None
    cached: int = 0
    monitored: tuple[Monitored, ...] = ()


Event = PromptLogprobs | Delta | Rows | Finished
