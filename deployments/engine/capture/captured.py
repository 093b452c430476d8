"""Recorded rows as they are handed out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the HTTP face imports this module, and needs no torch
    import torch

    from deployments.points.patterns import Patterns


class Captured(NamedTuple):
    """What was recorded of a request.

    Attributes:
        positions: [rows] index of each row's token in prompt + generated, ascending.
        token_ids: [rows] the token itself.
        values: Point name -> [rows, ...features], on the CPU; of attention patterns, rows that grow.
    """

    positions: Sequence[int]
    token_ids: Sequence[int]
    values: dict[str, torch.Tensor | Patterns]

    @property
    def bytes(self) -> int:
        """Memory that the values take."""
        return sum(value.nbytes for value in self.values.values())
