"""Massive activations: single values of a few tokens that dwarf all others of their hidden state.

Sun, Chen, Kolter and Liu (2024), "Massive Activations in Large Language Models", section 2. A hidden state is what a
layer gives for a whole sequence, `[tokens, features]`: here a run's recorded rows at a point. Its median is that of
its magnitudes, the lower one of two, rounded down to the 8 significant bits of bfloat16: so those of a long run are
counted in a histogram.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch

from evals.outliers.counts import Counts
from evals.outliers.stored import Batch, Stored

BINS = 1 << 15  # magnitudes in bfloat16
Batches = Callable[[], Iterator[Batch]]


class Rule(NamedTuple):
    """When a value is a massive activation.

    Attributes:
        magnitude: It is larger than this.
        ratio: It is at least so many times the median magnitude of its hidden state.
    """

    magnitude: float = 100.0
    ratio: float = 1000.0


def count(stored: Stored, rule: Rule) -> Counts:
    """Count massive activations; hidden states without a large value have no median taken.

    Args:
        stored: The residual stream after layers.
        rule: What counts. `Counts.beside` are the medians of hidden states.
    """
    counts = Counts(stored)
    edges = _edges(stored)
    for first, end in _spans(edges, stored.most):
        _count_span(counts, edges[first : end + 1], rule)
    return counts


def _edges(stored: Stored) -> np.ndarray:
    """The number of each run's first row, and at the end how many rows there are."""
    index = stored.index
    return np.append(index.starts[:-1][np.diff(index.run, prepend=-1) != 0], len(index))


def _spans(edges: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Runs `first` to `end` that have up to `most` rows together; a longer run is alone."""
    first = 0
    while first < len(edges) - 1:
        end = max(first + 1, int(np.searchsorted(edges, edges[first] + most, side="right")) - 1)
        yield first, end
        first = end


def _count_span(counts: Counts, edges: np.ndarray, rule: Rule) -> None:
    """Count the hidden states of some runs, which are one batch, or of a run of several batches, which is read again.

    Args:
        counts: What was counted so far.
        edges: Each run's first row, and the end of the last one.
        rule: What counts.
    """
    stored, first, end = counts.stored, int(edges[0]), int(edges[-1])
    held = list(stored.batches(first, end)) if end - first <= stored.most else None

    def batches() -> Iterator[Batch]:
        return iter(held) if held else stored.batches(first, end)

    tops = np.zeros((len(edges) - 1, len(stored.points)))
    for batch in batches():
        np.maximum.at(tops, _runs(batch, edges), batch.tops.T)
    medians = np.full(tops.T.shape, np.inf)  # [points, runs]
    for run in np.flatnonzero((tops > rule.magnitude).any(axis=1)):
        points = np.flatnonzero(tops[run] > rule.magnitude)
        medians[points, run] = _medians(batches, points, edges[run], edges[run + 1])
    least = np.maximum(np.nextafter(rule.magnitude, np.inf), rule.ratio * medians)
    for batch in batches():
        runs = _runs(batch, edges)
        counts.add(batch, least[:, runs], medians[:, runs])


def _runs(batch: Batch, edges: np.ndarray) -> np.ndarray:
    return np.searchsorted(edges, batch.rows, side="right") - 1


def _medians(batches: Batches, points: np.ndarray, first: int, end: int) -> np.ndarray:
    """The median magnitude of rows `first` to `end` at each of some points, float64 `[points]`."""
    pieces = (_magnitudes(batch, points, first, end) for batch in batches())
    few = list(islice(pieces, 2))
    if len(few) == 1 and few[0].shape[1] < BINS:  # else a histogram is faster, or all there is room for
        middle = (few[0].shape[1] - 1) // 2
        found = np.partition(few[0], middle, axis=1)[:, middle]
    else:
        found = _middle_bins(chain(few, pieces), len(points))
    medians: np.ndarray = (found.astype(np.int32) << 16).view(np.float32).astype(np.float64)
    return medians


def _magnitudes(batch: Batch, points: np.ndarray, first: int, end: int) -> np.ndarray:
    """The bits of magnitudes of rows `first` to `end` in bfloat16, rounded down, int16 `[points, values]`."""
    begin, until = np.searchsorted(batch.rows, [first, end])
    values = (batch.values[point][begin:until].flatten().float() for point in points)
    return np.stack([(of.view(torch.int32) >> 16 & BINS - 1).short().numpy() for of in values])


def _middle_bins(pieces: Iterable[np.ndarray], points: int) -> np.ndarray:
    """The median of all pieces `[points, values]`, the lower of two, `[points]`."""
    bins = np.zeros((points, BINS), dtype=np.int64)
    for piece in pieces:
        for point in range(points):
            bins[point] += np.bincount(piece[point], minlength=BINS)
    middle = (bins.sum(axis=1) - 1) // 2
    found: np.ndarray = (bins.cumsum(axis=1) > middle[:, None]).argmax(axis=1)
    return found
