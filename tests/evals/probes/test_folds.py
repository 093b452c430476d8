"""Groups stay whole in folds, and permuted labels keep the structure of groups."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from evals.config import EvalError
from evals.probes.folds import permuted, split


@given(sizes=st.lists(st.integers(1, 6), min_size=30, max_size=60), seed=st.integers(0, 99))
def test_no_group_is_in_two_folds(sizes: list[int], seed: int) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    positive = np.arange(len(groups)) % 2 == 0
    folds = split(positive, groups, 5, seed)
    assert all(len(set(folds[groups == group])) == 1 for group in range(len(sizes)))
    assert all(0 < positive[folds == fold].sum() < (folds == fold).sum() for fold in range(5))


@pytest.mark.parametrize(
    ("positive", "groups", "count", "message"),
    [
        ([1, 0] * 20, np.repeat(np.arange(8), 5), 5, "8 groups for 5 folds"),
        ([1] * 3 + [0] * 37, np.arange(40) // 2, 5, "3 examples of the smaller class are too few for 5 folds"),
        ([1] * 20 + [0] * 80, np.repeat(np.arange(20), 5), 5, "a fold has one class (positive + negative: "),
        ([1, 0] * 20, np.arange(40), 2, "--folds 2: nested cross-validation needs at least 3"),
    ],
)
def test_folds_that_cannot_be_are_refused_with_counts(
    positive: list[int], groups: np.ndarray, count: int, message: str
) -> None:
    with pytest.raises(EvalError, match=re.escape(message)):
        split(np.array(positive, dtype=bool), groups, count, 0)


def names(rows: int) -> np.ndarray:
    return np.array([f"run-{row:03}" for row in range(rows)])


def test_permuted_labels_do_not_depend_on_the_order_of_the_rows() -> None:
    groups, positive = np.repeat(np.arange(12), 4), np.arange(48) % 3 == 0
    order = np.random.default_rng(0).permutation(48)
    shuffled = permuted(positive[order], groups[order], names(48)[order], 3, 0)
    assert (shuffled == permuted(positive, groups, names(48), 3, 0)[:, order]).all()


@pytest.mark.parametrize("kind", ["balanced groups", "groups of one class", "groups of different shares"])
def test_permuted_labels_keep_the_groups_structure_and_are_at_chance(kind: str) -> None:
    groups, places = np.repeat(np.arange(40), 4), np.arange(160) % 4
    often = groups % 2 == 0
    positive = {"balanced groups": places % 2 == 0, "groups of one class": often}.get(
        kind, np.where(often, places > 0, places == 0)
    )
    labelings = permuted(positive, groups, names(160), 20, 0)
    shares = np.sort(positive.reshape(40, 4).sum(axis=1))
    assert all((np.sort(one.reshape(40, 4).sum(axis=1)) == shares).all() for one in labelings)
    for what in (positive, often):  # neither the labels nor a difference in base rate between groups is left
        assert abs(np.mean([roc_auc_score(one, what.astype(float)) for one in labelings]) - 0.5) < 0.05
    assert len(np.unique(labelings, axis=0)) == 20
