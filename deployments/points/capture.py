"""The `capture` field of a request: which activations to record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from deployments.errors import RequestError
from deployments.points.placement import Layout, placed
from deployments.points.strict import Strict
from deployments.points.token_choices import TokenChoice

LAYERNORM_SITES = ("input_layernorm.output", "post_attention_layernorm.output")

MOST_PROMPTS = 256  # of a request
MOST_INLINE_VALUES = 200_000  # numbers of activations, or of readouts, in an answer


def _distinct(numbers: list[int]) -> list[int]:
    return list(dict.fromkeys(numbers))


Tag = Annotated[str, Field(max_length=256)]
Tags = Annotated[dict[Tag, Tag], Field(max_length=64, fail_fast=True)]
Heads = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=1024, fail_fast=True), AfterValidator(_distinct)
]
SampleId = Annotated[str, Field(max_length=256)]


class Features(Strict):
    """The features (entries of a row's last axis) to record or change: the first n, or those listed."""

    model_config = ConfigDict(frozen=True)

    first: int | None = Field(default=None, ge=1)
    index: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, min_length=1, max_length=65536, fail_fast=True
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Features:
        if (self.first is None) == (self.index is None):
            raise ValueError('give either {"first": n} or {"index": [...]}')
        return self


class Capture(Strict):
    """The activations that a request records: points, tokens, and where they are returned or stored."""

    model_config = ConfigDict(frozen=True)

    points: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        default=None, min_length=1, max_length=1024, fail_fast=True
    )
    layers: Annotated[list[int], Field(min_length=1, max_length=1024, fail_fast=True)] | Literal["all"] | None = None
    sites: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        default=None, min_length=1, max_length=64, fail_fast=True
    )
    tokens: TokenChoice = "all"
    dtype: Literal["model", "float32", "float16", "bfloat16"] = "model"
    features: Features | None = None
    heads: Heads | None = None
    destination: Literal["reference", "inline", "id"] = Field(default="reference", alias="return")
    required: bool = False
    tags: Tags | Annotated[list[Tags], Field(max_length=MOST_PROMPTS, fail_fast=True)] = Field(default_factory=dict)
    sample_id: SampleId | Annotated[list[SampleId], Field(max_length=MOST_PROMPTS, fail_fast=True)] | None = None
    store_text: bool = False
    mode: Literal["generate", "trace"] = "generate"

    def check_prompts(self, count: int) -> None:
        """Check that lists of tags and sample ids have one entry for each prompt.

        Raises:
            RequestError: One of them is longer or shorter; names the field.
        """
        for name, value in (("tags", self.tags), ("sample_id", self.sample_id)):
            if isinstance(value, list) and len(value) != count:
                message = f"the list has {len(value)} entries for {count} prompts: give one entry for each prompt"
                raise RequestError(message, f"capture.{name}")

    def labels_of(self, prompt: int) -> tuple[str | None, dict[str, str]]:
        """The sample id and tags of the request's prompt with this number."""
        sample_id = self.sample_id[prompt] if isinstance(self.sample_id, list) else self.sample_id
        return sample_id, self.tags[prompt] if isinstance(self.tags, list) else self.tags

    def placed(self, layout: Layout) -> Capture:
        """The capture of one sequence, whose tokens by text or role have positions; see `placement.placed`.

        Raises:
            RequestError: The sequence has no such tokens.
        """
        tokens = placed(self.tokens, layout, "capture.tokens")
        return self if tokens is self.tokens else self.model_copy(update={"tokens": tokens})

    def values_of(self, shape: Sequence[int]) -> int:
        """The number of recorded values of a row of this shape."""
        *heads, width = shape
        heads = [len(self.heads)] if self.heads and heads else heads
        if self.features is not None:
            width = min(width, self.features.first) if self.features.first else len(self.features.index or ())
        return math.prod(heads) * width
