"""How examples are split, and how their labels are shuffled for controls: groups stay whole in both."""

from __future__ import annotations

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from evals.config import EvalError


def split(positive: np.ndarray, groups: np.ndarray, count: int, seed: int, grouped: bool = True) -> np.ndarray:
    """Each example's fold, `[n]`: stratified by class, with whole groups.

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
    if (distinct := len(np.unique(groups))) < 2 * count:
        many = f"{distinct} groups for {count} folds, where groups with equal prompts are one"
        raise EvalError(f"--group: {many}; each fold needs at least 2")
    if (few := min(positive.sum(), (~positive).sum())) < count:
        raise EvalError(f"--label: {few} examples of the smaller class are too few for {count} folds: use fewer folds")
    kind, by = (StratifiedGroupKFold, groups) if grouped else (StratifiedKFold, None)
    of = np.empty(len(positive), dtype=np.int64)
    for fold, (_, held_out) in enumerate(kind(count, shuffle=True, random_state=seed).split(of, positive, by)):
        of[held_out] = fold
    counts = [(int(positive[of == fold].sum()), int((~positive)[of == fold].sum())) for fold in range(count)]
    if any(min(pair) == 0 for pair in counts):
        listed = ", ".join(f"{yes} + {no}" for yes, no in counts)
        raise EvalError(f"--folds {count}: a fold has one class (positive + negative: {listed}); use fewer folds")
    return of


def permuted(positive: np.ndarray, groups: np.ndarray, names: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Labelings that a probe can learn nothing from, bool `[count, n]`.

    Groups exchange their labels, repeated or cut to the group's size, and each group's are permuted inside it. So a
    group keeps examples of both classes, or of one, as often as groups have them.

    Args:
        positive: Each example's class, `[n]`.
        groups: Each example's group, `[n]`.
        names: Each example's name, `[n]`: the order in which they are stored makes no difference.
        count: Labelings.
        seed: Of the permutations.
    """
    random = np.random.default_rng(seed)
    order = np.lexsort((names, groups))
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    labelings = np.empty((count, len(positive)), dtype=bool)
    for labeling in labelings:
        for rows, source in zip(members, random.permutation(len(members)), strict=True):
            labeling[rows] = np.resize(positive[members[source]], len(rows))
        for rows in members:
            labeling[rows] = random.permutation(labeling[rows])
    return labelings
