"""What a collection records, and the names of its runs."""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel, ConfigDict, Field

from deployments.collect.examples import Example
from deployments.points.capture import Capture
from deployments.points.token_choices import parse


class Settings(BaseModel):
    """What is recorded of each example.

    Attributes:
        model: The model's id.
        loaded: How the model is loaded: options that change what it computes.
        session: The session that the runs join.
        points: Names of points, with wildcards.
        tokens: Which tokens' rows, as `capture.tokens`.
        max_tokens: Tokens to generate after each prompt, greedily.
        block: Examples that are sent to an engine together, and made durable together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    loaded: str = ""
    session: str
    points: tuple[str, ...]
    tokens: str = "last"
    max_tokens: int = Field(default=0, ge=0)
    block: int = Field(default=512, ge=1)

    def capture(self, examples: list[Example]) -> Capture:
        """What a request with these examples records."""
        return Capture(
            points=list(self.points),
            tokens=parse(self.tokens),
            mode="generate" if self.max_tokens else "trace",
            store_text=True,
            tags=[example.tags for example in examples],
            sample_id=[example.id for example in examples],
        )

    def name(self, example: Example) -> str:
        """The example's name: the same whenever the same is recorded of it, so that it is stored once."""
        recorded = self.model_dump(mode="json", exclude={"block"})
        text = json.dumps([recorded, example.id, example.prompt, example.tags], sort_keys=True)
        return f"run-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
