"""What a collection records, and what its runs are named by."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from deployments.activations.facts import check_session_id
from deployments.activations.spec import Capture, Last
from deployments.collect.examples import DataError, Example


class Settings(BaseModel):
    """What is recorded of each example.

    Attributes:
        model: The model's id.
        session: The session that the runs join.
        points: Names of points, with wildcards.
        tokens: Which tokens' rows, as `capture.tokens`.
        max_tokens: Tokens to generate after each prompt, greedily.
        block: Examples that are sent to an engine together, and made durable together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    session: str
    points: tuple[str, ...]
    tokens: str = "last"
    max_tokens: int = Field(default=0, ge=0)
    block: int = Field(default=512, ge=1)

    def check(self) -> None:
        """Check what can be checked without a model.

        Raises:
            DataError: A value means nothing; names the option.
        """
        try:
            check_session_id(self.session)
            self.capture([])
        except ValueError as error:
            raise DataError(str(error)) from error

    def capture(self, examples: list[Example]) -> Capture:
        """What a request with these examples records."""
        return Capture(
            points=list(self.points),
            tokens=_tokens(self.tokens),
            mode="generate" if self.max_tokens else "trace",
            text=True,
            tags=[example.tags for example in examples],
            sample_id=[example.id for example in examples],
        )

    def run_id(self, example: Example) -> str:
        """The name of an example's run: the same whenever the same is recorded of it, so that it is stored once."""
        recorded = self.model_dump(mode="json", exclude={"block"})
        text = json.dumps([recorded, example.id, example.prompt, example.tags], sort_keys=True)
        return f"run-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _tokens(text: str) -> Any:
    """`last:3` as `capture.tokens` has it, and every other word as it is."""
    kind, _, number = text.partition(":")
    return Last(last=int(number)) if kind == "last" and number.isdecimal() else text
