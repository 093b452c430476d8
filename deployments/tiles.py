"""Matrix products in tiles of one fixed size, so that each row has the same bits whatever the other rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

TILE = 32  # rows


def in_tiles(x: torch.Tensor, width: int, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Compute [..., width] of rows x [..., features], `TILE` rows at a time; the last tile is padded with zeros.

    Libraries choose the order of a sum by the shape of a product, so the shape must not depend on the other rows.

    Args:
        x: The rows. The result has their dtype.
        width: The number of entries of each result row.
        product: Maps [TILE, features] to [TILE, width], each row by itself.
    """
    rows = x.reshape(-1, x.shape[-1])  # [rows, features]
    out = x.new_empty(len(rows), width)
    for first in range(0, len(rows), TILE):
        tile = rows[first : first + TILE]
        if len(tile) < TILE:
            out[first:] = product(functional.pad(tile, (0, 0, 0, TILE - len(tile))))[: len(tile)]
        else:
            out[first : first + TILE] = product(tile.contiguous())
    return out.view(*x.shape[:-1], width)
