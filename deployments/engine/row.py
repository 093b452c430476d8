"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.engine.recorder import Recording
from deployments.engine.request import FinishReason, Request
from deployments.engine.sampler import Sampler
from deployments.engine.text import TextStream

RESERVE = 256  # tokens a request must find room for beyond its prompt, or fewer where it asks for fewer


@dataclass(eq=False)
class Row:
    """A request on its way through the engine."""

    request: Request
    text: TextStream
    sampler: Sampler
    recording: Recording | None
    arrival: int
    tokens: list[int] = field(default_factory=list)
    fed: int = 0  # tokens in its KV slot
    ending: FinishReason | None = None  # decided; one more forward gives the last token its activations

    @property
    def sequence(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt, *self.tokens]

    @property
    def records_prefill(self) -> bool:
        """Whether a prefill brings rows to keep: of the prompt, or of tokens run again after a preemption."""
        if self.recording is None:
            return False
        return self.recording.wants_generated if self.tokens else self.recording.wants_prompt

    @property
    def need(self) -> int:
        """KV positions to find before it is admitted."""
        left = self.request.max_tokens - len(self.tokens)
        return len(self.request.prompt) + len(self.tokens) + min(left, RESERVE) + 1
