"""Groups stay whole in folds, and permuted labels keep each group's structure."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.auroc import auroc
from evals.config import EvalError
from evals.probes.fitting.folds import permuted, split


@given(sizes=st.lists(st.integers(1, 6), min_size=30, max_size=60), seed=st.integers(0, 99))
def test_no_group_is_in_two_folds_and_each_fit_leaves_out_its_folds(sizes: list[int], seed: int) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    positive = np.arange(len(groups)) % 2 == 0
    folds = split(positive, groups, 5, seed)
    for group in range(len(sizes)):
        assert len(set(folds.of[groups == group])) == 1
    for i in range(5):
        assert 0 < positive[folds.of == i].sum() < (folds.of == i).sum()
        for j in range(5):
            np.testing.assert_array_equal(folds.mask[folds.fit[i, j]].numpy(), (folds.of != i) & (folds.of != j))


@pytest.mark.parametrize(
    ("positive", "groups", "count", "message"),
    [
        ([1, 0] * 20, np.repeat(np.arange(8), 5), 5, "8 groups for 5 folds"),
        ([1] * 3 + [0] * 37, np.arange(40) // 2, 5, "3 examples of the smaller class are too few for 5 folds"),
        ([1] * 20 + [0] * 80, np.repeat(np.arange(20), 5), 5, "a fold has one class (positive + negative: "),
        (
            ([1] * 3 + [0]) * 14,
            np.repeat(np.arange(6), [25, 20, 5, 3, 2, 1]),
            3,
            "fewer than 2 groups (groups by fold: ",
        ),
        ([1, 0] * 20, np.arange(40), 2, "--folds 2: nested cross-validation needs at least 3"),
    ],
)
def test_folds_that_cannot_be_are_refused_with_counts(
    positive: list[int], groups: np.ndarray, count: int, message: str
) -> None:
    with pytest.raises(EvalError, match=re.escape(message)):
        split(np.array(positive, dtype=bool), groups, count, 0)


@given(
    counts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any), min_size=2, max_size=30),
    seed=st.integers(0, 99),
)
def test_permuted_labels_keep_the_shares_of_positives_among_groups(counts: list[tuple[int, int]], seed: int) -> None:
    positive = np.concatenate([np.repeat([True, False], pair) for pair in counts])
    groups = np.repeat(np.arange(len(counts)), [sum(pair) for pair in counts])

    def shares(labels: np.ndarray) -> tuple[list[tuple[int, int]], int]:
        """Positives and sizes of the groups of both classes, and how many groups have positives alone."""
        own = [labels[groups == group] for group in range(len(counts))]
        return sorted((int(one.sum()), len(one)) for one in own if 0 < one.sum() < len(one)), sum(map(np.all, own))

    for labels in permuted(positive, groups, names(positive), 3, seed):
        assert shares(labels) == shares(positive)


def names(rows: np.ndarray) -> np.ndarray:
    return np.array([f"run-{row:03}" for row in range(len(rows))])


def test_permuted_labels_do_not_depend_on_the_order_of_the_rows() -> None:
    groups, positive = np.repeat(np.arange(12), 4), np.arange(48) % 3 == 0
    order = np.random.default_rng(0).permutation(48)
    shuffled = permuted(positive[order], groups[order], names(positive)[order], 3, 0)
    assert (shuffled == permuted(positive, groups, names(positive), 3, 0)[:, order]).all()


def test_a_difference_in_base_rate_between_groups_is_no_part_of_the_null() -> None:
    groups = np.repeat(np.arange(40), 4)
    often = groups % 2 == 0
    positive = np.where(often, np.arange(160) % 4 > 0, np.arange(160) % 4 == 0)  # three of four, and one of four
    areas = auroc(np.broadcast_to(often.astype(float), (20, 160)), permuted(positive, groups, names(positive), 20, 0))[
        0
    ]
    assert auroc(often.astype(float), positive)[0] == 0.75
    assert abs(areas.mean() - 0.5) < 0.05


def test_labels_are_permuted_inside_balanced_groups_and_between_groups_of_one_class() -> None:
    groups = np.repeat(np.arange(40), 4)
    for positive in (np.arange(160) % 2 == 0, groups % 2 == 0):
        labelings = permuted(positive, groups, names(positive), 20, 0)
        agreement = (labelings == positive).mean(axis=1)
        assert abs(agreement.mean() - 0.5) < 0.05
        assert len(np.unique(labelings, axis=0)) == 20
