"""Stored rows as features: one row an example and choice of tokens, of one point at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from deployments.activations.reader.row_index import IDS, RowIndex
from deployments.activations.reader.row_reader import RowReader
from evals.config import EvalError

_ROWS = 8192  # read at once, unless one example has more


class Part(NamedTuple):
    """Some consecutive examples.

    Attributes:
        examples: Which.
        rows: All of their tokens' rows, float32 `[rows, hidden]`.
        starts: Each example's first row, `[examples]`.
    """

    examples: slice
    rows: np.ndarray
    starts: np.ndarray


def parts(index: RowIndex, point: str, ranges: np.ndarray) -> Iterator[Part]:
    """The rows of examples at a point, in memory that does not grow with their number.

    Args:
        index: Where the rows lie.
        point: The point.
        ranges: Each example's rows of the index, `[n, 2]`, none of which is empty.
    """
    reader = RowReader(only(index, point))
    counts = ranges[:, 1] - ranges[:, 0]
    first = 0
    while first < len(ranges):
        ends = np.cumsum(counts[first : first + _ROWS])
        end = first + max(1, int(np.searchsorted(ends, _ROWS, side="right")))
        size = counts[first:end]
        starts = np.cumsum(size) - size
        rows = np.repeat(ranges[first:end, 0] - starts, size) + np.arange(size.sum())
        values = reader.take(rows).points[point].float().numpy()
        yield Part(slice(first, end), values, starts)
        first = end


def features(index: RowIndex, point: str, ranges: np.ndarray) -> np.ndarray:
    """The mean of each example's rows, which is the row itself where there is one: float32 `[n, hidden]`.

    Raises:
        EvalError: Rows are not finite.
    """
    found = np.empty((len(ranges), *index.columns[point].shape), dtype=np.float32)
    bad = np.zeros(len(ranges), dtype=bool)
    for part in parts(index, point, ranges):
        if len(part.rows) == len(part.starts):
            found[part.examples] = part.rows
        else:
            counts = np.diff(part.starts, append=len(part.rows))
            found[part.examples] = np.add.reduceat(part.rows, part.starts, axis=0) / counts[:, None]
        bad[part.examples] = ~np.isfinite(found[part.examples]).all(axis=1)
    if bad.any():
        raise EvalError(f"--points {point}: {bad.sum()} of {len(bad)} examples have values that are not finite")
    return found


def largest(index: RowIndex, point: str, ranges: np.ndarray, weights: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Each example's largest score of a token, `[n, k]`.

    Args:
        index: As for `parts`.
        point: The same.
        ranges: The same.
        weights: On the rows as they were stored, `[hidden, k]`.
        bias: `[k]`.
    """
    found = np.empty((len(ranges), weights.shape[1]), dtype=np.float32)
    for part in parts(index, point, ranges):
        scores = part.rows @ weights.astype(np.float32) + bias.astype(np.float32)
        found[part.examples] = np.maximum.reduceat(scores, part.starts, axis=0)
    return found


def standardized(values: np.ndarray) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Features of mean 0 and deviation 1 over all examples, in place of the values, and that mean and deviation.

    It keeps numbers in a range where float32 is enough. No fit learns of the examples that it is not trained on: the
    solver standardizes again by its own rows, which undoes this.
    """
    mean = values.mean(axis=0, dtype=np.float64)
    for first in range(0, len(values), _ROWS):
        values[first : first + _ROWS] -= mean.astype(np.float32)
    center = mean.astype(np.float32).astype(np.float64)
    square = np.zeros_like(mean)
    for first in range(0, len(values), _ROWS):
        square += np.square(values[first : first + _ROWS], dtype=np.float64).sum(axis=0)
    std = np.sqrt(square / len(values)).astype(np.float32)
    std[std <= 1e-6 * (1e-6 + np.abs(mean))] = 1.0
    for first in range(0, len(values), _ROWS):
        values[first : first + _ROWS] /= std
    return torch.from_numpy(values), center, std.astype(np.float64)


def only(index: RowIndex, point: str) -> RowIndex:
    """An index of one point's rows alone."""
    names = list(index.columns)
    kept = [*IDS, point]
    return replace(
        index,
        columns={name: index.columns[name] for name in kept},
        offsets=index.offsets[[names.index(name) for name in kept]],
    )
