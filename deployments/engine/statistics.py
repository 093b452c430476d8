"""The engine's counters and sizes."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 16  # steps in the mean


@dataclass
class Statistics:
    """The engine's state in numbers.

    Attributes:
        running: Running requests.
        waiting: Waiting requests.
        kv_bytes: KV memory in use, including pages kept for later prompts.
        kv_budget_bytes: The most KV memory that the engine holds.
        capture_bytes: Recorded rows in host memory, including those released and not written yet.
        steps: Forward passes so far.
        step_seconds: The mean duration of the latest ones.
        tokens: Tokens generated so far.
        cached_tokens: Prompt tokens reused from an earlier request with the same prefix.
        tokens_per_second: The rate of the latest steps.
        preempted: Requests that lost their pages and ran again.
        out_of_memory: Forward passes that ran out of memory.
    """

    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0
    kv_budget_bytes: int = 0
    capture_bytes: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    tokens: int = 0
    tokens_per_second: float = 0.0
    cached_tokens: int = 0
    preempted: int = 0
    out_of_memory: int = 0

    def count_step(self, seconds: float, tokens: int) -> None:
        """Count one forward pass with its duration and number of tokens."""
        self.steps += 1
        weight = 1 / min(self.steps, WINDOW)
        self.step_seconds += (seconds - self.step_seconds) * weight
        self.tokens_per_second += ((tokens / seconds if seconds else 0.0) - self.tokens_per_second) * weight
