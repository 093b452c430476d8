"""Groups stay whole in folds, and permuted labels keep each group's structure."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.config import EvalError
from evals.probes.folds import permuted, split


@settings(max_examples=25, deadline=None)
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
        ([1] * 3 + [0] * 37, np.arange(40) // 2, 5, "3 examples of the smaller class for 5 folds"),
        ([1] * 20 + [0] * 80, np.repeat(np.arange(20), 5), 5, "a fold has one class (positive + negative: "),
        (
            ([1] * 3 + [0]) * 14,
            np.repeat(np.arange(6), [25, 20, 5, 3, 2, 1]),
            3,
            "fewer than 2 groups (groups by fold: ",
        ),
        ([1, 0] * 20, np.arange(40), 2, "--folds 2: nested cross-validation needs 3"),
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
def test_permuted_labels_keep_the_structure_of_each_group(counts: list[tuple[int, int]], seed: int) -> None:
    positive = np.concatenate([np.repeat([True, False], pair) for pair in counts])
    groups = np.repeat(np.arange(len(counts)), [sum(pair) for pair in counts])
    for labels in permuted(positive, groups, 3, seed):
        whole = 0
        for group, (yes, no) in enumerate(counts):
            own = labels[groups == group]
            if yes and no:
                assert own.sum() == yes
            else:
                assert own.all() or not own.any()
                whole += int(own.any())
        assert whole == sum(not no for _, no in counts)


def test_labels_are_permuted_inside_balanced_groups_and_between_groups_of_one_class() -> None:
    groups = np.repeat(np.arange(40), 4)
    for positive in (np.arange(160) % 2 == 0, groups % 2 == 0):
        labelings = permuted(positive, groups, 20, 0)
        agreement = (labelings == positive).mean(axis=1)
        assert abs(agreement.mean() - 0.5) < 0.05
        assert len(np.unique(labelings, axis=0)) == 20
