"""AUROC is scikit-learn's inside each fold; intervals cover, and are refused where they cannot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from evals.auroc import Area, area, band, interval


@given(scores=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=8, max_size=40), split=st.integers(1, 3))
def test_auroc_is_averaged_over_folds_by_their_pairs_and_never_pooled(scores: list[float], split: int) -> None:
    values, positive = np.array(scores), np.arange(len(scores)) % 4 < split
    folds = (np.arange(len(scores)) >= 4).astype(int)
    values[folds == 1] += 10  # the folds' scores are of different probes
    pairs = [positive[folds == fold].sum() * (~positive[folds == fold]).sum() for fold in (0, 1)]
    each = [roc_auc_score(positive[folds == fold], values[folds == fold]) for fold in (0, 1)]
    assert area(values, positive, np.arange(len(scores)), folds).value == pytest.approx(np.average(each, weights=pairs))
    assert area(values, positive, folds).value == pytest.approx(roc_auc_score(positive, values))


def test_intervals_cover_as_often_as_they_say_and_bands_all_rows_at_once() -> None:
    random, held, alone = np.random.default_rng(0), np.zeros(2), 0
    groups, positive = np.repeat(np.arange(40), 4), np.arange(160) % 2 == 0
    for _ in range(200):
        shifts = random.normal(size=(12, 40)) * (1 - 2 * positive.reshape(40, 4)[:, :1].T)
        scores = random.normal(size=(12, 160)) + np.repeat(shifts, 4, axis=1)
        areas = [area(one, positive, groups, groups % 5) for one in scores]
        for place, bounds in enumerate((band(areas), [interval(one) for one in areas])):
            inside = [one.low is not None and one.high is not None and one.low <= 0.5 <= one.high for one in bounds]
            held[place] += all(inside)
        alone += inside[0]
    assert held[0] >= 180 > held[1]
    assert alone >= 180


def test_a_difference_is_paired() -> None:
    scores, positive = np.random.default_rng(0).normal(size=160), np.arange(160) % 2 == 0
    own = area(scores, positive, np.arange(160) // 4)
    assert interval(own.less(own), is_difference=True) == (0.0, 0.0, None)


def test_few_groups_have_no_interval_and_perfect_scores_are_not_certain() -> None:
    few, perfect = Area(0.7, np.full(19, 0.01)), Area(1.0, np.zeros(40))
    assert interval(few) == (None, None, "19 groups; an interval needs 20")
    assert band([few, few])[1].reason == "19 groups; an interval needs 20"
    low, high, _ = interval(perfect)
    assert low is not None
    assert 0.85 < low < 1 == high
    positive = np.arange(40) % 2 == 0
    scores = np.where(positive, 1.0, 0.0) + np.arange(40) / 100
    scores[39] = 1.005  # above one of the positive examples
    near = area(scores, positive, np.arange(40))
    assert 0.997 < near.value < 1
    assert interval(near).low == pytest.approx(low, abs=0.01)  # as wide as where every pair is in order
