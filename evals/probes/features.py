"""Stored rows as features: one vector an example and choice of tokens, of one point at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deployments.activations.reader.row_index import IDS, RowIndex
from deployments.activations.reader.row_reader import RowReader
from evals.config import EvalError

_ROWS = 8192  # read at once, unless one example has more


def features(index: RowIndex, point: str, ranges: np.ndarray) -> np.ndarray:
    """The mean of each example's rows, which is the row itself where there is one: float32 `[n, hidden]`.

    Args:
        index: Where the rows lie.
        point: The point.
        ranges: Each example's rows of the index, `[n, 2]`, none of which is empty.

    Raises:
        EvalError: Rows are not finite.
    """
    reader = RowReader(_only(index, point))
    counts = ranges[:, 1] - ranges[:, 0]
    means = np.empty((len(ranges), *index.columns[point].shape), dtype=np.float32)
    first = 0
    while first < len(ranges):
        ends = np.cumsum(counts[first : first + _ROWS])
        end = first + max(1, int(np.searchsorted(ends, _ROWS, side="right")))
        size = counts[first:end]
        starts = np.cumsum(size) - size
        rows = np.repeat(ranges[first:end, 0] - starts, size) + np.arange(size.sum())
        values = reader.take(rows).points[point].float().numpy()
        means[first:end] = np.add.reduceat(values, starts, axis=0) / size[:, None]
        first = end
    if bad := int((~np.isfinite(means).all(axis=1)).sum()):
        raise EvalError(f"--points {point}: {bad} of {len(means)} examples have values that are not finite")
    return means


def _only(index: RowIndex, point: str) -> RowIndex:
    """An index of one point's rows alone."""
    names = list(index.columns)
    kept = [*IDS, point]
    return replace(
        index,
        columns={name: index.columns[name] for name in kept},
        offsets=index.offsets[[names.index(name) for name in kept]],
    )
