"""Sizes of recorded rows; those of attention patterns depend on the token's position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from deployments.places.hook_site import Point
from deployments.points.capture import Capture
from deployments.points.patterns import keys
from deployments.points.token_choices import Tokens

SPARE_ROWS = 64  # rows beyond the requested last ones that gather before they are dropped
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class RowSizes(NamedTuple):
    """The size of one token's rows of all points, in bytes or in numbers."""

    fixed: int  # the part that is the same for every token
    each_key: int  # the part for each token that it attends to, itself included

    @classmethod
    def bytes(cls, capture: Capture, points: Iterable[Point]) -> RowSizes:
        """Bytes, in the model's dtype or the requested one, whichever is larger."""
        asked = DTYPES.get(capture.dtype)
        least = asked.itemsize if asked else 0
        return cls._of(capture, [(point, max(point.place.dtype.itemsize, least)) for point in points])

    @classmethod
    def numbers(cls, capture: Capture, points: Iterable[Point]) -> RowSizes:
        """The number of values."""
        return cls._of(capture, [(point, 1) for point in points])

    @classmethod
    def _of(cls, capture: Capture, sizes: Iterable[tuple[Point, int]]) -> RowSizes:
        fixed = each_key = 0
        for point, size in sizes:
            if point.place.grows:
                each_key += size * (len(capture.heads) if capture.heads else point.shape[0])
            else:
                fixed += size * capture.values_of(point.shape)
        return cls(fixed, each_key)

    def of(self, positions: Sequence[int]) -> int:
        """The total size of the rows at these positions."""
        seen = keys(positions) if isinstance(positions, range) else sum(positions) + len(positions)
        return self.fixed * len(positions) + self.each_key * seen

    def until_end(self, wanted: Tokens, tokens: int) -> int:
        """The most that is held until the end of `tokens` tokens, if only the last rows are recorded."""
        if not wanted.tail:
            return 0
        rows = min(2 * wanted.tail + SPARE_ROWS, tokens)
        # Only the last pattern rows and the new ones are held.
        return self.fixed * rows + self.each_key * keys(range(max(0, tokens - 2 * wanted.tail), tokens))
