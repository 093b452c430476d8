"""A sequence: one request while it is generated."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, field

from deployments.engine.capture.buffer import CaptureBuffer
from deployments.engine.decoding.prompt_logprobs import PromptScores
from deployments.engine.decoding.sampling_state import SamplingState
from deployments.engine.decoding.text import TextStream
from deployments.engine.request import Delta, FinishReason, LayerTokens, LensLayers, MemoryUse, Request, StopReason
from deployments.model.kv_cache import SequenceKv
from deployments.readouts.sequence import SequenceReadouts

RESERVED_TOKENS = 256  # tokens that a request must have memory for beyond its prompt; fewer if it requests fewer


@dataclass(eq=False)
class Sequence:
    """One request in the engine, and its state.

    Attributes:
        request: The request.
        text: Its text so far.
        sampling_state: The state for drawing its next token.
        recording: Its recorded rows.
        scores: The logprobs of its prompt's tokens, until they are emitted.
        arrival: Its number in the order of arrival.
        memory: The memory held when it was admitted, and since.
        tokens: Generated so far.
        kv: Its pages of keys and values.
        fed: The number of tokens whose keys and values are computed.
        cached: The number of prompt tokens that an earlier sequence had computed.
        turn: The engine's step in which it last ran.
        place: Its place among the waiting sequences.
        overtaken: The number of later sequences admitted while it waited for pages.
        no_memory_at: Its length when it last ran out of memory alone.
        stalled: It is paused until its recorded rows are written or its grammar is compiled.
        unsent: Deltas kept until its end, if it is not streamed.
        ending: The finish reason; one more forward pass computes the last token's activations.
        prompt_lens: The lens of the prompt so far, by positions.
        readouts: The values of its readouts; None if it requests none.
        stop_reason: The row that met its `stop_when`.
    """

    request: Request
    text: TextStream
    sampling_state: SamplingState
    recording: CaptureBuffer | None
    arrival: int
    scores: PromptScores | None = None
    memory: MemoryUse = field(default_factory=MemoryUse)
    tokens: list[int] = field(default_factory=list)
    kv: SequenceKv = field(default_factory=SequenceKv)
    fed: int = 0
    cached: int = 0
    turn: int = 0
    place: int = 0
    overtaken: int = 0
    no_memory_at: int = -1
    stalled: bool = False
    unsent: list[Delta] = field(default_factory=list)
    ending: FinishReason | None = None
    prompt_lens: list[tuple[int, tuple[LayerTokens, ...]]] = field(default_factory=list)
    readouts: SequenceReadouts | None = None
    stop_reason: StopReason | None = None

    @property
    def length(self) -> int:
        """The number of tokens in prompt and answer."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt, *self.tokens]

    @property
    def decodes(self) -> bool:
        """Whether its next forward pass is a decode: only its last token has not run, and it is not recorded yet."""
        recorded = self.recording is not None and self.recording.rows >= self.length
        return bool(self.tokens) and self.fed >= self.length - 1 and not self.stalled and not recorded

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

    @property
    def may_stop(self) -> bool:
        """Whether its `stop_when` can end it now."""
        return bool(self.request.max_tokens) and len(self.tokens) >= self.request.sampling.min_tokens

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
