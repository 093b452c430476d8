"""Recorded rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the HTTP layer imports this module, and needs no torch
    import torch

    from deployments.points.patterns import Patterns


class Captured(NamedTuple):
    """The recorded rows of a request.

    Attributes:
        positions: [rows] index of each row's token in prompt + answer, ascending.
        token_ids: [rows] each row's token.
        values: Point name -> [rows, ...features], on the CPU; the rows of attention patterns grow.
    """

    positions: Sequence[int]
    token_ids: Sequence[int]
    values: dict[str, torch.Tensor | Patterns]

    @property
    def bytes(self) -> int:
        """Memory of the values."""
        return sum(value.nbytes for value in self.values.values())
