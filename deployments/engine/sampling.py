"""Drawing the next token for every sampled row of a batch at once, each by its own settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deployments.engine.request import Sampling


def draw(logits: torch.Tensor, settings: Sequence[Sampling], uniform: Sequence[float]) -> torch.Tensor:
    """Draw one token per row by inverting its cumulative distribution, likeliest token first.

    A row's draw depends on its own logits, settings and number alone, not on its neighbours.

    Args:
        logits: [rows, vocabulary], finite.
        settings: One per row, of a temperature above 0.
        uniform: One number from [0, 1) per row.

    Returns:
        [rows] token ids.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits.device, dtype=torch.float32)[:, None]  # [rows, 1]

    vocabulary = logits.shape[-1]
    ordered, ids = logits.float().sort(dim=-1, descending=True, stable=True)  # [rows, vocabulary]
    rank = torch.arange(vocabulary, device=logits.device)
    # Taken from the largest first, so that a tiny temperature cannot overflow.
    scaled = (ordered - ordered[:, :1]) / column([max(setting.temperature, 1e-5) for setting in settings])
    kept = column([min(setting.top_k or vocabulary, vocabulary) for setting in settings])
    scaled = scaled.masked_fill(rank >= kept, -torch.inf)
    weights = scaled.softmax(dim=-1)
    # A token is allowed while those before it have not reached top_p; the first always is.
    before = weights.cumsum(dim=-1) - weights
    allowed = (before < column([setting.top_p for setting in settings])) & (weights > 0)
    allowed[:, 0] = True
    cumulative = weights.masked_fill(~allowed, 0.0).cumsum(dim=-1)
    at = (cumulative <= column(uniform) * cumulative[:, -1:]).sum(dim=-1)  # [rows]
    at = torch.minimum(at, allowed.sum(dim=-1) - 1)  # rounding may carry a number near 1 past the end
    return ids.gather(-1, at[:, None]).squeeze(-1)
