"""AUROC by fold with intervals from a bootstrap over groups.

AUROC compares examples of one fold only, whose scores come from one probe, and is averaged over folds by their pairs of
a positive and a negative example.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

GROUPS = 20  # below, no interval
_RESAMPLED = 1 << 22  # numbers of one step of the bootstrap


class Interval(NamedTuple):
    """A 95% interval, or why there is none."""

    low: float | None
    high: float | None
    reason: str | None = None

    def reasons(self, name: str) -> dict[str, str]:
        """The reason by the names of the bounds of a figure; nothing where there is an interval."""
        return dict.fromkeys((f"{name}_low", f"{name}_high"), self.reason) if self.reason else {}


def auroc(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Area under the ROC curve, ties counting half, and how many pairs it compares.

    Args:
        scores: `[..., n]`.
        positive: Bool, broadcast to it.

    Returns:
        The area, 0 where there is no pair, and the pairs, `[...]` each.
    """
    positive = np.broadcast_to(positive, scores.shape)
    ranks = _ranks(scores)
    yes = positive.sum(axis=-1)
    pairs = yes * (scores.shape[-1] - yes)
    above = (ranks * positive).sum(axis=-1) - yes * (yes + 1) / 2
    return above / np.maximum(pairs, 1), pairs


def _ranks(scores: np.ndarray) -> np.ndarray:
    """Ranks from 1 of scores `[..., n]` among the last axis; ties share their mean."""
    ranks = np.empty(scores.shape)
    for place in np.ndindex(scores.shape[:-1]):
        _, which, counts = np.unique(scores[place], return_inverse=True, return_counts=True)
        ranks[place] = (np.cumsum(counts) - (counts - 1) / 2)[which]
    return ranks


def by_folds(scores: np.ndarray, positive: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """AUROC by fold, averaged by pairs, `[...]`; `nan` without any pair.

    Args:
        scores: `[..., n]`.
        positive: Bool, broadcast to it.
        folds: Each example's fold, `[n]`.
    """
    positive = np.broadcast_to(positive, scores.shape)
    found = [auroc(scores[..., folds == fold], positive[..., folds == fold]) for fold in np.unique(folds)]
    areas, pairs = (np.stack(part) for part in zip(*found, strict=True))
    total = pairs.sum(axis=0)
    return np.where(total > 0, (areas * pairs).sum(axis=0) / np.maximum(total, 1), np.nan)


def resampled(
    scores: np.ndarray, positive: np.ndarray, folds: np.ndarray, groups: np.ndarray, count: int, seed: int
) -> np.ndarray:
    """AUROC as `by_folds` of `count` samples of as many groups with replacement, `[r, count]`.

    The probes are not fitted again: what varies is which groups they are tried on. All score vectors have the same
    samples, so that their differences are paired.

    Args:
        scores: `[r, n]`.
        positive: Bool `[n]`.
        folds: Each example's fold, `[n]`.
        groups: Each example's group, `[n]`.
        count: Samples.
        seed: Of the samples.
    """
    random = np.random.default_rng(seed)
    names, group = np.unique(groups, return_inverse=True)
    ranked = [
        [_Ranked.of(row, positive, np.flatnonzero(folds == fold), group) for fold in np.unique(folds)] for row in scores
    ]
    found, first = np.empty((len(scores), count)), 0
    while first < count:
        size = min(count - first, max(1, _RESAMPLED // max(len(group), len(names))))
        drawn = random.integers(len(names), size=(size, len(names)))
        weights = np.stack([np.bincount(row, minlength=len(names)) for row in drawn]).astype(np.float64)
        for row, parts in enumerate(ranked):
            above, pairs = np.sum([part.compare(weights) for part in parts], axis=0)
            found[row, first : first + size] = np.where(pairs > 0, above / np.maximum(pairs, 1), np.nan)
        first += size
    return found


class _Ranked(NamedTuple):
    """A fold's scores in order: groups of negatives and positives, and how many negatives are below each positive."""

    negative: np.ndarray
    positive: np.ndarray
    below: np.ndarray
    upto: np.ndarray

    @classmethod
    def of(cls, scores: np.ndarray, positive: np.ndarray, rows: np.ndarray, group: np.ndarray) -> _Ranked:
        yes, no = rows[positive[rows]], rows[~positive[rows]]
        no = no[np.argsort(scores[no])]
        ordered = scores[no]
        sides = (np.searchsorted(ordered, scores[yes], side=side) for side in ("left", "right"))
        return cls(group[no], group[yes], *sides)

    def compare(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs in the right order and all pairs, weighted, `[samples]` each; `weights` is `[samples, groups]`."""
        negatives = np.cumsum(weights[:, self.negative], axis=1)
        negatives = np.concatenate([np.zeros((len(weights), 1)), negatives], axis=1)
        positives = weights[:, self.positive]
        above = (positives * (negatives[:, self.below] + negatives[:, self.upto])).sum(axis=1) / 2
        return above, positives.sum(axis=1) * negatives[:, -1]


def interval(estimate: float, samples: np.ndarray, groups: int, exact: bool = True) -> Interval:
    """The 95% percentile interval of an AUROC, or of a difference of two.

    Where every pair is in order, samples have no spread: the interval then ends where that would happen in one of 40
    tries, if so large a share of groups had a pair out of order (Clopper and Pearson, 1934).

    Args:
        estimate: The AUROC.
        samples: Of its bootstrap, `[samples]`.
        groups: How many groups there are.
        exact: Whether 0 and 1 are the ends of an AUROC, whose samples have no spread.
    """
    if groups < GROUPS:
        return Interval(None, None, f"{groups} groups; an interval needs {GROUPS}")
    if exact and estimate in (0.0, 1.0):
        return _exact(estimate, groups, 0.025)
    low, high = np.nanquantile(samples, [0.025, 0.975])
    return Interval(float(low), float(high))


def band(estimates: np.ndarray, samples: np.ndarray, groups: int) -> list[Interval]:
    """Intervals that hold all of many AUROCs at once in 95 of 100 cases, by the largest of their deviations (max-t).

    Args:
        estimates: `[r]`.
        samples: Of their joint bootstrap, `[r, samples]`.
        groups: How many groups there are.
    """
    if groups < GROUPS:
        return [interval(float(estimate), samples, groups) for estimate in estimates]
    spread = np.nanstd(samples, axis=1)
    varies = spread > 0
    deviations = np.abs(samples[varies] - estimates[varies, None]) / spread[varies, None]
    widest = float(np.nanquantile(np.nanmax(deviations, axis=0), 0.95)) if varies.any() else 0.0
    return [
        _exact(float(at), groups, 0.025 / len(estimates))
        if by == 0 and at in (0.0, 1.0)
        else Interval(max(0.0, float(at - widest * by)), min(1.0, float(at + widest * by)))
        for at, by in zip(estimates, spread, strict=True)
    ]


def _exact(estimate: float, groups: int, tail: float) -> Interval:
    low = tail ** (1 / groups)
    return Interval(low, 1.0) if estimate > 0.5 else Interval(0.0, 1 - low)
