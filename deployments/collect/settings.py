"""What a collection records, and the names of its runs."""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel, ConfigDict, Field

from deployments.collect.examples import Example
from deployments.points.capture import Capture
from deployments.points.token_choices import parse


class Settings(BaseModel):
    """The settings of a collection.

    Attributes:
        model: The model's id.
        loaded: Options of loading that change the model's results.
        session: The session of the runs.
        points: Names of points, with wildcards.
        tokens: The tokens to record, as `capture.tokens`.
        max_tokens: Tokens to generate after each prompt, greedily.
        block: The most examples that an engine has at once, or that are grouped into requests to a server together.
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
        """The capture of a request with these examples."""
        return Capture.model_validate(
            {
                "points": list(self.points),
                "tokens": parse(self.tokens),
                "mode": "generate" if self.max_tokens else "trace",
                "return": "id",
                "store_text": True,
                "tags": [example.tags for example in examples],
                "sample_id": [example.id for example in examples],
            }
        )

    def name(self, example: Example) -> str:
        """The example's name; the same for the same example and settings, so that it is stored once."""
        recorded = self.model_dump(mode="json", exclude={"block"})
        text = json.dumps([recorded, example.id, example.prompt, example.tags], sort_keys=True)
        return f"run-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
