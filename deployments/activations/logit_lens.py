"""What a request asks to see of its layers: the `logit_lens` field of the HTTP contract."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from deployments.activations.strict import Strict

MOST_LIKELIEST = 20  # tokens of a layer, as of `logprobs`


class LogitLens(Strict):
    """For each generated token, what the model's final norm and head make of these layers' outputs."""

    model_config = ConfigDict(frozen=True)

    layers: Annotated[list[int], Field(min_length=1, max_length=1024, fail_fast=True)] | Literal["all"] = "all"
    top_k: int = Field(default=5, ge=1, le=MOST_LIKELIEST)
