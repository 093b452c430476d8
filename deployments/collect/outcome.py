"""What becomes of examples."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What became of a block of examples.

    Attributes:
        runs: Runs that were stored.
        tokens: Tokens of these runs, generated ones included.
        already_stored: Examples whose runs an earlier command had stored, or that came twice.
        failures: The others: where each is, and why.
        began: When the first was sent to the model, in Unix seconds.
        ended: When the last was durable.
    """

    runs: int = 0
    tokens: int = 0
    already_stored: int = 0
    failures: list[str] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0

    def add(self, tokens: int) -> None:
        """Count one stored run."""
        self.runs += 1
        self.tokens += tokens
