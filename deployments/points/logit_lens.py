"""The `logit_lens` field of a request: which layers' next-token predictions to return."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from deployments.points.strict import Strict
from deployments.points.token_choices import TokenChoice

MOST_TARGETS = 32
MOST_LIKELIEST = 20  # tokens of a layer, as of `logprobs`


class LogitLens(Strict):
    """What the model's final norm and head make of these layers' outputs.

    At each generated token it is what the layers would have put in its place; at a token of the prompt, what they would
    put after it.

    Attributes:
        layers: Which, from 0; below 0 from the last.
        top_k: How many of the likeliest tokens.
        tokens: Which; without it the generated ones, or where none is generated the prompt's last.
        targets: Tokens, by their text or id, whose logprob and rank are wanted besides; or at each token, that which
            the model's last layer puts first.
    """

    model_config = ConfigDict(frozen=True)

    layers: Annotated[list[int], Field(min_length=1, max_length=1024, fail_fast=True)] | Literal["all"] = "all"
    top_k: int = Field(default=5, ge=0, le=MOST_LIKELIEST)
    tokens: TokenChoice | None = None
    targets: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)] | Annotated[int, Field(ge=0, lt=2**31)]],
            Field(max_length=MOST_TARGETS, fail_fast=True),
        ]
        | Literal["last_layer"]
    ) = Field(default_factory=list)
