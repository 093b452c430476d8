"""A place of a model, and a point: a place by the name that requests use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from deployments.places.architectures import Side

Layout = Literal["batched", "flat", "patterns"]


@dataclass(frozen=True)
class Place:
    """One side of one module, as a forward showed it.

    Attributes:
        module: The module's path in the Hugging Face model.
        side: Whether it is what the module reads, what it gives, or the attention patterns that it gives beside.
        order: Its turn in a forward; places are read in this order.
        stream: The layer to whose input the value is added, where the place is their sum: the residual stream between
            attention and MLP, which no module reads or gives for others to change.
        layout: `batched` for [batch, tokens, ...], `flat` for [batch * tokens, ...], `patterns` for
            [batch, heads, tokens, tokens seen].
        shape: One token's shape; of patterns (heads,), behind which an axis grows with the token's position.
        dtype: The values' dtype.
    """

    module: str
    side: Side
    order: int
    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    stream: str | None = None

    @property
    def grows(self) -> bool:
        """Whether the value of the token at position k is [heads, k + 1]."""
        return self.layout == "patterns"


@dataclass(frozen=True)
class Point:
    """A name a user may capture by, and the place it means.

    Attributes:
        name: The name, with wildcards and negative indices resolved.
        place: Where the value is read.
        shape: One token's shape; the place's own, but for `attention.heads`, [heads, head_dim].
    """

    name: str
    place: Place
    shape: tuple[int, ...]

    @property
    def module(self) -> str:
        """The place in the model's own words, `model.layers.8.self_attn.output`."""
        if self.place.stream:
            return f"{self.place.stream}.resid_mid"
        return f"{self.place.module}.{self.place.side}"
