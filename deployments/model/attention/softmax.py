"""How products of a row with keys become weights, as a model's attention module says."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Softmax(NamedTuple):
    """The parameters of a softmax over keys.

    Attributes:
        scaling: The factor of the products.
        window: The most tokens that a row reads, itself included; 0 for all before it.
        softcap: Limits the products by tanh; 0 for none.
        sinks: [heads] logits that take weight without a value.
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it has neither a softcap nor sinks."""
        return not self.softcap and self.sinks is None
