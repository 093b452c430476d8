"""The `logit_lens` field of a request: which layers' next-token predictions to return."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from deployments.conditions import ReadoutName
from deployments.points.strict import Strict
from deployments.points.token_choices import TokenChoice

MOST_TARGETS = 32
MOST_LIKELIEST = 20  # tokens of a layer, as of `logprobs`


class LogitLens(Strict):
    """The model's final norm and head applied to the outputs of layers.

    For a generated token it shows what the layers predict in its place; for a token of the prompt, what they predict
    after it.

    Attributes:
        layers: The layers, from 0; negative numbers count from the last.
        top_k: How many top tokens of each layer to return.
        tokens: The tokens; by default the generated ones, or the prompt's last if none is generated.
        targets: Tokens, by text or id, whose logprob and rank are returned as well; or `last_layer`, at each token the
            top token of the model's last layer.
        lens: The fitted lens through which each layer is read; by default none.
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
    lens: ReadoutName | None = None
