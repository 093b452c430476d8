"""Attention patterns, whose rows are as wide as the tokens that each token attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch


def keys(positions: range) -> int:
    """The number of tokens that those at these positions attend to, all together: k + 1 for position k."""
    return len(positions) * (positions.start + positions.stop + 1) // 2


class Patterns(Sequence[torch.Tensor]):
    """The attention patterns of consecutive tokens: the row of the token at position k is `[heads, k + 1]`.

    Rows, and slices of them, are views of `values`.

    Attributes:
        values: The rows concatenated, each by heads, `[heads * keys(positions)]`.
        heads: The number of heads.
        positions: The rows' positions in prompt + answer.
    """

    def __init__(self, values: torch.Tensor, heads: int, positions: range) -> None:
        """Initialize from concatenated rows.

        Raises:
            ValueError: The number of values does not fit.
        """
        if values.shape != (heads * keys(positions),):
            raise ValueError(f"{tuple(values.shape)} values are not those of {heads} heads at {positions}")
        self.values = values
        self.heads = heads
        self.positions = positions

    @classmethod
    def joined(cls, parts: Sequence[Patterns]) -> Patterns:
        """Join consecutive parts."""
        if len(parts) == 1:
            return parts[0]
        positions = range(parts[0].positions.start, parts[-1].positions.stop)
        return cls(torch.cat([part.values for part in parts]), parts[0].heads, positions)

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Patterns: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | Patterns:
        positions = self.positions[index]
        if isinstance(positions, int):
            return self._between(range(positions, positions + 1)).view(self.heads, positions + 1)
        if positions.step != 1:
            raise ValueError("a slice of patterns holds consecutive tokens: its step is 1")
        return Patterns(self._between(positions), self.heads, positions)

    def _between(self, positions: range) -> torch.Tensor:
        first = self.heads * keys(range(self.positions.start, positions.start))
        return self.values[first : first + self.heads * keys(positions)]

    def __repr__(self) -> str:
        return f"Patterns({len(self)} rows of {self.heads} heads from position {self.positions.start}, {self.dtype})"

    @property
    def shape(self) -> tuple[int, int, None]:
        """(rows, heads, None): the last axis grows."""
        return len(self), self.heads, None

    @property
    def dtype(self) -> torch.dtype:
        """The values' dtype."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Memory of the values."""
        return self.values.nbytes

    def padded(self) -> torch.Tensor:
        """A copy in one tensor, `[rows, heads, widest row]`, with zeros after each row's own token."""
        whole = self.values.new_zeros(len(self), self.heads, self.positions.stop if self.positions else 0)
        for place, row in zip(whole, self, strict=True):
            place[:, : row.shape[1]] = row
        return whole
