"""AUROC with a 95% interval for examples in groups.

Examples are compared inside a fold, whose scores come from one probe, and folds are averaged by their pairs of a
positive and a negative example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evals.stats import Z95, wilson

GROUPS = 20  # below, no interval
_DRAWS = 2000


class Interval(NamedTuple):
    """A 95% interval, or why there is none."""

    low: float | None
    high: float | None
    reason: str | None = None


class Area(NamedTuple):
    """An AUROC, or a difference of two over the same examples."""

    value: float  # the area; 0 without a pair
    influence: np.ndarray  # what each group adds to the value's deviation from the truth, `[groups]`

    @property
    def error(self) -> float:
        """The standard error, of groups: that of Obuchowski (1997), Biometrics 53, 567-578."""
        count = len(self.influence)
        return math.sqrt(count / max(count - 1, 1) * float(np.square(self.influence).sum()))

    def less(self, other: Area) -> Area:
        """The difference to another one of the same examples, hence paired."""
        return Area(self.value - other.value, self.influence - other.influence)


def area(scores: np.ndarray, positive: np.ndarray, groups: np.ndarray, folds: np.ndarray | None = None) -> Area:
    """Area under the ROC curve, ties counting half.

    Args:
        scores: `[n]`.
        positive: Bool `[n]`.
        groups: Each example's group, `[n]`.
        folds: Each example's fold, `[n]`; without it all are in one.
    """
    names, group = np.unique(groups, return_inverse=True)
    total, pairs, influence = 0.0, 0, np.zeros(len(names))
    folds = np.zeros(len(scores)) if folds is None else folds
    for fold in np.unique(folds):
        yes, no = (np.flatnonzero((folds == fold) & of) for of in (positive, ~positive))
        below = _below(scores[no], scores[yes])  # of each positive: negatives
        above = len(yes) - _below(scores[yes], scores[no])  # of each negative: positives
        mean = below.sum() / max(len(yes) * len(no), 1)
        np.add.at(influence, group[yes], below - mean * len(no))
        np.add.at(influence, group[no], above - mean * len(yes))
        total, pairs = total + float(below.sum()), pairs + len(yes) * len(no)
    return Area(total / max(pairs, 1), influence / max(pairs, 1))


def _below(of: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """How many of some numbers are below each score, equal ones counting half."""
    ordered = np.sort(of)
    counts: np.ndarray = (np.searchsorted(ordered, scores, "left") + np.searchsorted(ordered, scores, "right")) / 2
    return counts


def interval(of: Area, width: float | None = None, *, is_difference: bool = False) -> Interval:
    """The interval of an AUROC, by Wilson's score, or of a difference, by Student's t.

    Wilson's interval (1927) is that of a share of as many independent observations as have the AUROC's standard error
    (Korn and Graubard 1998, Survey Methodology 24, 193-201). For this error, groups also count half a group with every
    pair in order and half a group with none, which is Jeffreys' prior of a share. So groups that show no spread, as
    where every pair is in order, are as many observations as there are groups.

    Args:
        of: The AUROC.
        width: Standard errors to each side; without it the t quantile of so many groups (Cornish and Fisher's).
        is_difference: Whether it is one, from -1 to 1.
    """
    groups = len(of.influence)
    if groups < GROUPS:
        return Interval(None, None, f"{groups} groups; an interval needs {GROUPS}")
    if width is None:
        width = Z95 + (Z95**3 + Z95) / (4 * (groups - 1))
    if is_difference:
        return Interval(max(-1.0, of.value - width * of.error), min(1.0, of.value + width * of.error))
    low, high = wilson(of.value, _observations(of), width)
    return Interval(low, high)


def _observations(of: Area) -> float:
    """How many independent observations of a share have an AUROC's standard error."""
    groups = len(of.influence)
    mean = (groups * of.value + 0.5) / (groups + 1)
    # Of the groups' pseudovalues, value + groups * influence, and of two halves at 1 and 0.
    squares = groups**2 * float(np.square(of.influence).sum()) + groups * (of.value - mean) ** 2
    squares += 0.5 * ((1 - mean) ** 2 + mean**2)
    return mean * (1 - mean) * groups * (groups + 1) / squares


def band(areas: Sequence[Area]) -> list[Interval]:
    """Intervals that hold all of several AUROCs at once in 95 of 100 cases, by their largest deviation (max-t)."""
    influence = np.stack([of.influence for of in areas])
    unit = influence / np.maximum(np.linalg.norm(influence, axis=1, keepdims=True), np.finfo(float).tiny)
    random, freedom = np.random.default_rng(0), max(influence.shape[1] - 1, 1)
    normal = random.multivariate_normal(np.zeros(len(areas)), unit @ unit.T, _DRAWS, method="eigh")
    deviations = np.abs(normal).max(axis=1) / np.sqrt(random.chisquare(freedom, _DRAWS) / freedom)
    width = float(np.quantile(deviations, 0.95))
    return [interval(of, width) for of in areas]
