"""Recorded attention patterns of one request."""

from __future__ import annotations

import torch


class PatternRows:
    """Attention patterns of one point on the host, one tensor for each row.

    Attributes:
        bytes: Memory of the counted rows.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._rows: list[torch.Tensor] = []  # [heads * (k + 1)] of the token at position k
        self._new: list[torch.Tensor] = []  # written and not counted yet

    def write(self, first: int, value: torch.Tensor) -> None:
        """Copy rows [rows, heads, keys] from position `first` on; each row is zero after its own token."""
        own = [value[i, :, : first + i + 1] for i in range(len(value))]
        self._new = [row.clone(memory_format=torch.contiguous_format).view(-1) for row in own]

    def keep(self, tail: int | None) -> None:
        """Count the rows written last; keep only the last `tail` rows of all, unless `tail` is None."""
        self._rows += self._new
        dropped = self._rows[:-tail] if tail else []
        self.bytes += sum(row.nbytes for row in self._new) - sum(row.nbytes for row in dropped)
        del self._rows[: len(dropped)]
        self._new = []

    def last(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """The values of the last rows, concatenated."""
        return torch.cat(self._rows[-rows:]) if rows else torch.empty(0, dtype=dtype)
