"""The engine's counters and sizes."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 16  # steps that a mean looks back on


@dataclass
class Statistics:
    """What the engine is doing.

    Attributes:
        running: Requests under way.
        waiting: Requests that wait.
        kv_bytes: KV memory in use, what is kept for later prompts included.
        kv_budget_bytes: The most KV memory that will be held.
        capture_bytes: Recorded rows in host memory: gathered, or handed out and not written yet.
        steps: Forwards so far.
        step_seconds: How long one takes, a mean of the latest.
        tokens: Tokens generated so far.
        cached_tokens: Prompt tokens that were run for an earlier request with the same beginning.
        tokens_per_second: The rate of the latest steps.
        preempted: Requests that lost their pages and were run again.
        out_of_memory: Forwards that found no memory.
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
        """Count one forward that took so long and brought so many tokens."""
        self.steps += 1
        weight = 1 / min(self.steps, WINDOW)
        self.step_seconds += (seconds - self.step_seconds) * weight
        self.tokens_per_second += ((tokens / seconds if seconds else 0.0) - self.tokens_per_second) * weight
