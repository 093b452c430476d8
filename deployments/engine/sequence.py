"""A sequence: one request that is being generated."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, field

from deployments.engine.capture.buffer import CaptureBuffer
from deployments.engine.decoding.prompt_logprobs import PromptScores
from deployments.engine.decoding.sampling_state import SamplingState
from deployments.engine.decoding.text import TextStream
from deployments.engine.read_values import SequenceReadouts
from deployments.engine.request import Delta, FinishReason, LayerTokens, LensLayers, MemoryUse, Request, StopReason
from deployments.model.kv_cache import SequenceKv

RESERVED_TOKENS = 256  # tokens a request must find room for beyond its prompt, or fewer where it asks for fewer


@dataclass(eq=False)
class Sequence:
    """A request on its way through the engine.

    Attributes:
        request: What was asked.
        text: Its text as it grows.
        sampling_state: What it brings to the draw of its next token.
        recording: What it records.
        scores: What is said of its prompt's tokens, until it is said.
        arrival: Its turn.
        memory: What the process held when it was admitted, and since.
        tokens: Generated so far.
        kv: Where its keys and values lie.
        fed: Tokens whose keys and values are there.
        cached: Tokens of its prompt that another sequence had run before.
        turn: The engine's step in which it last ran.
        overtaken: How many later sequences were taken in while it waited for pages.
        no_memory_at: Its length when it last found no memory by itself.
        stalled: What it recorded waits to be written, or its grammar to be compiled: it goes on when that is done.
        unsaid: What it has to say at its end, where it is not streamed.
        ending: Decided; one more forward gives the last token its activations.
        prompt_lens: What its lens read of the prompt so far, by positions.
        readouts: What its readouts gave; None where it asks for none.
        stop_reason: Which row met its `stop_when`.
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
    overtaken: int = 0
    no_memory_at: int = -1
    stalled: bool = False
    unsaid: list[Delta] = field(default_factory=list)
    ending: FinishReason | None = None
    prompt_lens: list[tuple[int, tuple[LayerTokens, ...]]] = field(default_factory=list)
    readouts: SequenceReadouts | None = None
    stop_reason: StopReason | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and generation."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt, *self.tokens]

    @property
    def decodes(self) -> bool:
        """Whether its next forward is a decode: all but its last token is in, and that one is not recorded yet."""
        recorded = self.recording is not None and self.recording.rows >= self.length
        return bool(self.tokens) and self.fed >= self.length - 1 and not self.stalled and not recorded

    @property
    def wants_last(self) -> bool:
        """Whether its last token is run through, too, for the token's own row."""
        recorded = self.recording is not None and self.recording.wants_generated
        return recorded or (self.readouts is not None and self.readouts.wants_generated)

    @property
    def records_prefill(self) -> bool:
        """Whether a prefill brings rows to keep: of the prompt, or of tokens run again after a preemption."""
        if self.recording is None:
            return False
        return self.recording.wants_generated if self.tokens else self.recording.wants_prompt

    @property
    def may_stop(self) -> bool:
        """Whether its `stop_when` may end it now."""
        return bool(self.request.max_tokens) and len(self.tokens) >= self.request.sampling.min_tokens

    @property
    def lens(self) -> LensLayers | None:
        """What to say of layers with the token that its next forward decides; None where it decides none."""
        asked = self.request.lens
        return asked if asked and asked.generated and self.request.max_tokens and not self.ending else None

    def lensed(self, start: int, stop: int) -> collections.abc.Sequence[int]:
        """The positions from `start` to before `stop` whose layers are asked for and were not read yet."""
        if self.request.lens is None:
            return ()
        known = self.prompt_lens[-1][0] + 1 if self.prompt_lens else 0
        return self.request.lens.prompt.within(max(start, known), min(stop, len(self.request.prompt)))

    @property
    def unshared(self) -> int:
        """The first position that it must run itself: it is read or changed there, or decides the next token."""
        request, prompt = self.request, len(self.request.prompt)
        firsts = [self.length - 1, self.unchanged]
        if self.recording:
            firsts.append(self.recording.next_wanted)
        if self.scores:
            firsts.append(len(self.scores.logprobs))
        firsts += [check.known for gate in request.gates for check in gate.checks if not check.here]
        firsts += self.readouts.known if self.readouts else []
        if request.lens:
            firsts += [next(iter(self.lensed(0, prompt)), prompt)]
        return max(0, min(firsts))

    @property
    def unchanged(self) -> int:
        """Up to which position its keys and values are those of any sequence with its tokens."""
        return min((edit.tokens.first for edit in self.request.edits), default=self.length)

    @property
    def need(self) -> int:
        """KV positions to find before it is admitted."""
        left = self.request.max_tokens - len(self.tokens)
        return self.length + min(left, RESERVED_TOKENS)
