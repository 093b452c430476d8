"""Attention masks over the slots, in the form that the architecture takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Form = Literal["by_layer_type", "single"]
# Windows that architectures have in fields of their own: wider than a probe is long, they would not show.
OTHER_WINDOWS = ("window_size", "attention_chunk_size", "keep_window_size", "sliding_window_size")


@dataclass(frozen=True)
class Masks:
    """Builds the masks of rows that attend to what their slots hold.

    Attributes:
        form: A dict of masks by layer type, or one for all layers. Only some architectures take a dict, and
            the others' windows are in their one mask; a probe at load decides.
        windows: Layer type -> its attention window in tokens, None for full attention.
        boolean: Whether the attention takes True for "reads"; eager attention adds its mask instead.
        dtype: The additive mask's dtype.
    """

    form: Form
    windows: dict[str, int | None]
    boolean: bool
    dtype: torch.dtype

    def build(self, positions: torch.Tensor, longest: int) -> Any:
        """The `attention_mask` argument of a forward over slots.

        Args:
            positions: [batch, tokens] each token's own position.
            longest: How many slot positions are read.

        Returns:
            [batch, 1, tokens, longest], or a dict of such by layer type.
        """
        slot = torch.arange(longest, device=positions.device)
        masks = {kind: self._mask(slot, positions[..., None], window) for kind, window in self.windows.items()}
        return masks if self.form == "by_layer_type" else next(iter(masks.values()))

    def _mask(self, slot: torch.Tensor, position: torch.Tensor, window: int | None) -> torch.Tensor:
        reads = slot <= position  # [batch, tokens, longest]
        if window is not None:
            reads &= slot > position - window
        reads = reads[:, None]
        if self.boolean:
            return reads
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(reads.shape, dtype=self.dtype, device=reads.device).masked_fill_(~reads, lowest)


def candidates(config: Any, attention: str, dtype: torch.dtype) -> list[Masks]:
    """The forms a model's config allows, likeliest first; a probe tries them in turn."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    boolean = attention == "sdpa"
    found = []
    if kinds and set(kinds) <= {"full_attention", "sliding_attention"}:
        by_kind = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        found.append(Masks("by_layer_type", by_kind, boolean, dtype))
    if len(kinds) < 2:  # one mask cannot say that some layers have a window and some have none
        only = None if kinds == ["full_attention"] else window
        found += [Masks("single", {"all": one}, boolean, dtype) for one in dict.fromkeys((only, None))]
    return found


def unknown_window(config: Any) -> str | None:
    """The field in which a config states an attention window that no mask here has; None where there is none."""
    return next((field for field in OTHER_WINDOWS if getattr(config, field, None)), None)


@contextmanager
def windows_of(length: int, model: nn.Module) -> Iterator[None]:
    """While open, a model's windows are so many tokens: then a few tokens show whether it has them.

    Some configs state a window that their model does not have.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    stated = [(config, window) for config in configs.values() if (window := getattr(config, "sliding_window", None))]
    try:
        for config, _ in stated:
            config.sliding_window = length
        yield
    finally:
        for config, window in stated:
            config.sliding_window = window
