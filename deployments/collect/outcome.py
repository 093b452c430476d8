"""The result of one block of examples."""

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
        refusal: Why no example can be stored: the fault of the arguments, the engine or the server.
        began: When the first was sent to the model, in Unix seconds.
        ended: When the last was durable.
    """

    runs: int = 0
    tokens: int = 0
    already_stored: int = 0
    failures: list[str] = field(default_factory=list)
    refusal: str | None = None
    began: float = 0.0
    ended: float = 0.0

    def add(self, place: str, status: str, tokens: int, reason: str | None) -> None:
        """Count one run that ended.

        Args:
            place: Where its example is.
            status: `stored`, or why not in a word.
            tokens: How many it has.
            reason: Why it is not stored.
        """
        if status == "stored":
            self.runs += 1
            self.tokens += tokens
        else:
            self.failures.append(f"{place}: {reason}")

    def refuse(self, place: str, message: str, field: str | None, status: int) -> None:
        """Count one example that was refused.

        Args:
            place: Where it is.
            message: Why.
            field: The request's field that is at fault.
            status: As of HTTP.
        """
        if (field or "").startswith("capture.points"):
            self.refusal = f"--points: {message}"
        elif field == "model":
            self.refusal = f"--model: {message}"
        elif status not in (400, 413, 422):  # no fault of the example's
            self.refusal = f"{place}: {message}"
        else:
            self.failures.append(f"{place}: {message}")
