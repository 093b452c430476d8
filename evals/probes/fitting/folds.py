"""How examples are split, and how their labels are shuffled for controls: groups stay whole in both.

The five folds are both the outer and the inner ones. For the outer fold i, the inner fits leave out i and one other
fold j in turn; the fit without i and j serves the outer fold j as well, so nested cross-validation of F folds takes
F (F + 1) / 2 fits in place of F squared.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from evals.config import EvalError


@dataclass(frozen=True, eq=False)
class Folds:
    """Folds and the fits that they need.

    Attributes:
        of: Each example's fold, `[n]`.
        count: Folds.
        mask: Which examples each fit is trained on, bool `[fits, n]`: first the fits without one fold, in order, then
            those without two.
        fit: The fit without folds i and j, `[count, count]`.
    """

    of: np.ndarray
    count: int
    mask: torch.Tensor
    fit: np.ndarray


def split(positive: np.ndarray, groups: np.ndarray, count: int, seed: int, grouped: bool = True) -> Folds:
    """Stratified folds that keep groups whole.

    Args:
        positive: Each example's class, bool `[n]`.
        groups: Each example's group, `[n]`.
        count: Folds.
        seed: Of their choice.
        grouped: Whether groups hold more than one example.

    Raises:
        EvalError: There are fewer than two groups a fold, or a fold has one class.
    """
    if count < 3:
        raise EvalError(f"--folds {count}: nested cross-validation needs at least 3")
    there = len(np.unique(groups))
    if there < 2 * count:
        raise EvalError(f"--group: {there} groups for {count} folds; each fold needs at least 2")
    few = min(positive.sum(), (~positive).sum())
    if few < count:
        raise EvalError(f"--label: {few} examples of the smaller class are too few for {count} folds: use fewer folds")
    kind, by = (StratifiedGroupKFold, groups) if grouped else (StratifiedKFold, None)
    of = np.empty(len(positive), dtype=np.int64)
    for fold, (_, held_out) in enumerate(kind(count, shuffle=True, random_state=seed).split(of, positive, by)):
        of[held_out] = fold
    counts = [(int(positive[of == fold].sum()), int((~positive)[of == fold].sum())) for fold in range(count)]
    if any(min(pair) == 0 for pair in counts):
        listed = ", ".join(f"{yes} + {no}" for yes, no in counts)
        raise EvalError(f"--folds {count}: a fold has one class (positive + negative: {listed}); use fewer folds")
    within = [len(np.unique(groups[of == fold])) for fold in range(count)]
    if min(within) < 2:
        listed = ", ".join(map(str, within))
        raise EvalError(f"--folds {count}: a fold has fewer than 2 groups (groups by fold: {listed}); use fewer folds")
    return from_folds(of, count)


def from_folds(of: np.ndarray, count: int) -> Folds:
    """The fits that folds need.

    Args:
        of: Each example's fold, `[n]`.
        count: Folds.
    """
    left_out = [(fold, fold) for fold in range(count)] + list(combinations(range(count), 2))
    mask = np.array([(of != i) & (of != j) for i, j in left_out])
    fit = np.empty((count, count), dtype=np.int64)
    for number, (i, j) in enumerate(left_out):
        fit[i, j] = fit[j, i] = number
    return Folds(of, count, torch.from_numpy(mask), fit)


def permuted(positive: np.ndarray, groups: np.ndarray, names: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Labelings that a probe can learn nothing from, bool `[count, n]`, each with the structure of the labels.

    Groups of the same size exchange their labels whole, and then each group's labels are permuted inside it. Sizes of
    which all groups have the same one class exchange with each other. A group of both classes that has no other of its
    size keeps its share of positives.

    Args:
        positive: Each example's class, `[n]`.
        groups: Each example's group, `[n]`.
        names: Each example's name, `[n]`: the order in which they are stored makes no difference.
        count: Labelings.
        seed: Of the permutations.
    """
    random = np.random.default_rng(seed)
    members = _members(groups, names)
    exchanging = _exchanging(members, positive)
    found = np.repeat(positive[None], count, axis=0)
    for labeling in found:
        for some in exchanging:
            for rows, source in zip(some, random.permutation(len(some)), strict=True):
                labeling[rows] = np.resize(positive[some[source]], len(rows))  # of one class where sizes differ
        for rows in members:
            labeling[rows] = random.permutation(labeling[rows])
    return found


def _members(groups: np.ndarray, names: np.ndarray) -> list[np.ndarray]:
    order = np.lexsort((names, groups))
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


def _exchanging(groups: list[np.ndarray], positive: np.ndarray) -> list[list[np.ndarray]]:
    """Groups in sets within which they exchange labels."""
    by_size = defaultdict[int, list[np.ndarray]](list)
    for rows in groups:
        by_size[len(rows)].append(rows)
    found, rest = list[list[np.ndarray]](), list[np.ndarray]()
    for some in by_size.values():
        labels = positive[np.concatenate(some)]
        if labels.any() and not labels.all():
            found.append(some)
        else:
            rest += some
    return [*found, rest] if rest else found
