"""A place of a model, and a point: a place with the name that requests use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from deployments.places.architectures import Side

# [batch, tokens, ...], [batch * tokens, ...], or [batch, heads, tokens, tokens seen].
Layout = Literal["batched", "flat", "patterns"]


@dataclass(frozen=True)
class HookSite:
    """One side of one module, as observed in a forward pass."""

    module: str  # its path in the Hugging Face model
    side: Side
    order: int  # its order in a forward pass; places are read in this order
    layout: Layout
    shape: tuple[int, ...]  # one token's; for patterns (heads,), after which an axis grows with the token's position
    dtype: torch.dtype
    # The layer, if the place is its residual stream between attention and MLP. The module reads it. A change is made in
    # place, and so continues in the stream.
    stream: str | None = None

    @property
    def grows(self) -> bool:
        """Whether the value of the token at position k is [heads, k + 1]."""
        return self.layout == "patterns"


@dataclass(frozen=True)
class Point:
    """A name of a place in requests, and the place."""

    name: str  # wildcards and negative indices are resolved
    place: HookSite
    shape: tuple[int, ...]  # one token's; the place's own except for `attention.heads`, [heads, head_dim]

    @property
    def module(self) -> str:
        """The place in the model's own names, `model.layers.8.self_attn.output`."""
        if self.place.stream:
            return f"{self.place.stream}.resid_mid"
        return f"{self.place.module}.{self.place.side}"
