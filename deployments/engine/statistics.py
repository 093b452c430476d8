"""The engine's counters and sizes."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 16  # steps in the mean


@dataclass
class Statistics:
    """The engine's state in numbers."""

    running: int = 0  # requests
    waiting: int = 0  # requests
    kv_bytes: int = 0  # KV memory in use, including pages kept for later prompts
    kv_budget_bytes: int = 0  # the most KV memory that the engine holds
    capture_bytes: int = 0  # recorded rows in host memory, including those released and not written yet
    steps: int = 0  # forward passes so far
    step_seconds: float = 0.0  # the mean duration of the latest ones
    tokens: int = 0  # generated so far
    tokens_per_second: float = 0.0  # the rate of the latest steps
    cached_tokens: int = 0  # prompt tokens reused from an earlier request with the same prefix
    preempted: int = 0  # requests that lost their pages and ran again
    out_of_memory: int = 0  # forward passes that ran out of memory

    def count_step(self, seconds: float, tokens: int) -> None:
        """Count one forward pass with its duration and number of tokens."""
        self.steps += 1
        weight = 1 / min(self.steps, WINDOW)
        self.step_seconds += (seconds - self.step_seconds) * weight
        self.tokens_per_second += ((tokens / seconds if seconds else 0.0) - self.tokens_per_second) * weight
