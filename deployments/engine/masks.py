"""Attention masks over the slots, in the form that the architecture takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Form = Literal["by_layer_type", "single"]


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
        found.append(Masks("single", {"all": only}, boolean, dtype))
    return found
