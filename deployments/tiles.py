"""Matrix products in tiles of fixed sizes: of one, each row has the same bits whatever the other rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

TILE = 32  # rows


def in_tiles(
    x: torch.Tensor,
    width: int,
    product: Callable[[torch.Tensor], torch.Tensor],
    sizes: Sequence[int] = (TILE,),
) -> torch.Tensor:
    """Compute [..., width] of rows x [..., features] in pieces of certain sizes; the last is padded with zeros.

    Libraries choose the order of a sum by the shape of a product, so the shape must not depend on the other rows where
    bits matter: there is one size then.

    Args:
        x: The rows. The result has their dtype.
        width: The number of entries of each result row.
        product: Maps [size, features] to [size, width], each row by itself.
        sizes: The numbers of rows of a product, ascending. More rows are split into pieces of the last size.
    """
    rows, most = x.reshape(-1, x.shape[-1]), sizes[-1]  # [rows, features]
    count = len(rows)
    if count > most:
        out = x.new_empty(count, width)
        for first in range(0, count, most):
            out[first : first + most] = in_tiles(rows[first : first + most], width, product, sizes)
    else:
        more = sizes[bisect_left(sizes, count)] - count
        out = product(functional.pad(rows, (0, 0, 0, more)))[:count] if more else product(rows.contiguous())
        out = out.to(x.dtype)
    return out.reshape(*x.shape[:-1], width)
