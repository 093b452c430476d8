"""The result of one block of examples."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """The outcome of a block of examples.

    Attributes:
        runs: The number of stored runs.
        tokens: Tokens of these runs, including generated ones.
        already_stored: The number of examples that were stored before or repeated.
        failures: The place of each other example, and the reason.
        refusal: Why no example can be stored: an error of the arguments, the engine or the server.
        began: When the first example was sent to the model, in Unix seconds.
        ended: When the last run was durable.
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
            place: The place of its example.
            status: `stored`, or another status.
            tokens: The run's number of tokens.
            reason: Why it is not stored.
        """
        if status == "stored":
            self.runs += 1
            self.tokens += tokens
        else:
            self.failures.append(f"{place}: {reason}")

    def refuse(self, place: str, message: str, field: str | None, status: int) -> None:
        """Count one rejected example.

        Args:
            place: The example's place.
            message: The reason.
            field: The request's wrong field.
            status: The HTTP status.
        """
        if (field or "").startswith("capture.points"):
            self.refusal = f"--points: {message}"
        elif field == "model":
            self.refusal = f"--model: {message}"
        elif status not in (400, 413, 422):  # not an error of the example
            self.refusal = f"{place}: {message}"
        else:
            self.failures.append(f"{place}: {message}")
