"""A sequence: one request while it is generated."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, field

from deployments.engine.capture.buffer import CaptureBuffer
from deployments.engine.decoding.prompt_logprobs import PromptScores
from deployments.engine.decoding.sampling_state import SamplingState
from deployments.engine.decoding.text import TextStream
from deployments.engine.edits import ActingEdits
from deployments.engine.monitors import Watch
from deployments.engine.request import Delta, FinishReason, LayerTokens, LensLayers, MemoryUse, Request, StopReason
from deployments.model.batch import SequenceKv
from deployments.readouts.sequence import SequenceReadouts

RESERVED_TOKENS = 256  # tokens that a request must have memory for beyond its prompt; fewer if it requests fewer


@dataclass(eq=False)
class Sequence:
    """One request in the engine, and its state."""

    request: Request
    text: TextStream  # so far
    sampling_state: SamplingState
    recording: CaptureBuffer | None  # its recorded rows
    arrival: int  # its number in the order of arrival
    inside: bool = False  # whether it visits places that prompts and decodes reach in separate calls of a module
    scores: PromptScores | None = None  # the logprobs of its prompt's tokens, until they are emitted
    memory: MemoryUse = field(default_factory=MemoryUse)
    tokens: list[int] = field(default_factory=list)  # generated so far; `add` appends to them
    length: int = field(init=False)  # of prompt and answer, in tokens
    kv: SequenceKv = field(default_factory=SequenceKv)
    fed: int = 0  # tokens whose keys and values are computed
    cached: int = 0  # prompt tokens that an earlier sequence had computed
    turn: int = 0  # the step in which it last ran, if sequences do not share forward passes
    overtaken: int = 0  # later sequences admitted while it waited for pages
    overtakes: int = 0  # sequences before it that found too few pages when it was last to be admitted
    no_memory_at: int = -1  # its length when it last ran out of memory alone
    stalled: bool = False  # paused until its recorded rows are written or its grammar is compiled
    unsent: list[Delta] = field(default_factory=list)  # kept until its end, if it is not streamed
    done: bool = False  # it has ended; a forward pass launched before may still have a row of it
    ending: FinishReason | None = None  # one more forward pass computes the last token's activations
    prompt_lens: list[tuple[int, tuple[LayerTokens, ...]]] = field(default_factory=list)  # by positions
    readouts: SequenceReadouts | None = None
    watch: Watch | None = field(init=False)  # the values of its monitors
    stop_reason: StopReason | None = None  # the row that met its `stop_when` or a monitor
    acting: ActingEdits | None = None  # the result of `acting_at`, until another position needs another

    def __post_init__(self) -> None:
        self.length = len(self.request.prompt) + len(self.tokens)
        self.reads = bool(self.readouts or self.request.gates)  # whether readouts are read for it
        self.watch = Watch(self.request.monitors, len(self.request.prompt)) if self.request.monitors else None

    def add(self, token: int) -> None:
        """Append its next token."""
        self.tokens.append(token)
        self.length += 1
        self.sampling_state.add(token)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt, *self.tokens]

    @property
    def decodes(self) -> bool:
        """Whether its next forward pass is a decode: only its last token has not run, and it is not recorded yet."""
        if self.fed < self.length - 1 or not self.tokens or self.stalled:
            return False
        return self.recording is None or self.recording.rows < self.length

    @property
    def wants_last(self) -> bool:
        """Whether its last token also runs, for that token's own row."""
        recorded = self.recording is not None and self.recording.wants_generated
        return recorded or (self.readouts is not None and self.readouts.wants_generated)

    @property
    def records_prefill(self) -> bool:
        """Whether a prefill has rows to record: of the prompt, or of tokens that run again after a preemption."""
        if self.recording is None:
            return False
        return self.recording.wants_generated if self.tokens else self.recording.wants_prompt

    def may_stop(self, reason: StopReason) -> bool:
        """Whether its `stop_when` can end it now; the operator's monitors always can."""
        is_due = bool(self.request.max_tokens) and len(self.tokens) >= self.request.sampling.min_tokens
        return is_due or reason.monitor is not None

    @property
    def lens(self) -> LensLayers | None:
        """The lens for the token that its next forward pass predicts; None if there is none."""
        asked = self.request.lens
        return asked if asked and asked.generated and self.request.max_tokens and not self.ending else None

    def lensed(self, start: int, stop: int) -> collections.abc.Sequence[int]:
        """The positions in [start, stop) whose lens is requested and was not read yet."""
        if self.request.lens is None:
            return ()
        known = self.prompt_lens[-1][0] + 1 if self.prompt_lens else 0
        return self.request.lens.prompt.within(max(start, known), min(stop, len(self.request.prompt)))

    def acting_at(self, position: int) -> ActingEdits:
        """The edits that act on the token at a position; the same object for as many tokens as they are the same."""
        if self.acting is None or not self.acting.start <= position < self.acting.stop:
            self.acting = ActingEdits.at(position, self.request.edits)
        return self.acting

    @property
    def unshared(self) -> int:
        """The first position that it must compute itself: it is read or changed there, or predicts the next token."""
        request, prompt = self.request, len(self.request.prompt)
        firsts = [self.length - 1, self.unchanged]
        if self.recording:
            firsts.append(self.recording.next_wanted)
        if self.scores:
            firsts.append(len(self.scores.logprobs))
        firsts += [gate.known for gate in request.gates if not gate.here]
        firsts += self.readouts.known if self.readouts else []
        firsts += [self.watch.known] if self.watch else []
        if request.lens:
            firsts += [next(iter(self.lensed(0, prompt)), prompt)]
        return max(0, min(firsts))

    @property
    def unchanged(self) -> int:
        """The end of the prefix whose keys and values are the same for any sequence with its tokens."""
        return min((edit.tokens.first for edit in self.request.edits), default=self.length)

    @property
    def need(self) -> int:
        """The KV positions that must be free to admit it."""
        left = self.request.max_tokens - len(self.tokens)
        return self.length + min(left, RESERVED_TOKENS)
