"""What a request asks to see of its layers: the `logit_lens` field of the HTTP contract."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_LIKELIEST = 20  # tokens of a layer, as of `logprobs`


class LogitLens(BaseModel):
    """For each generated token, what the model's final norm and head make of these layers' outputs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    layers: Annotated[list[int], Field(min_length=1, max_length=1024)] | Literal["all"] = "all"
    top_k: int = Field(default=5, ge=1, le=MOST_LIKELIEST)
