"""Figures are scikit-learn's where it has them; intervals cover, and are refused where they cannot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from evals.auroc import auroc, band, by_folds, interval, resampled
from evals.probes.fitting.score_figures import bins, platt, rare


@given(scores=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, 3.0]), min_size=4, max_size=40), split=st.integers(1, 3))
def test_auroc_is_that_of_scikit_learn_with_ties(scores: list[float], split: int) -> None:
    positive = np.arange(len(scores)) % 4 < split
    area, pairs = auroc(np.array(scores), positive)
    assert area == pytest.approx(roc_auc_score(positive, scores))
    assert pairs == positive.sum() * (~positive).sum()


def test_auroc_is_averaged_over_folds_by_their_pairs_and_never_pooled() -> None:
    folds = np.array([0, 0, 1, 1, 1, 1, 1])
    positive = np.array([True, False, True, True, False, False, False])
    scores = np.array([10.0, 9.0, 0.0, 1.0, -1.0, 0.5, 2.0])  # the folds' scores are of different probes
    first, second = (roc_auc_score(positive[folds == fold], scores[folds == fold]) for fold in (0, 1))
    assert by_folds(scores, positive, folds) == pytest.approx((1 * first + 6 * second) / 7)


@given(seed=st.integers(0, 1000))
def test_a_sample_of_groups_has_the_auroc_of_its_examples(seed: int) -> None:
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(6), 3)
    folds, positive = groups % 2, np.tile([True, False, True], 6)
    scores = random.integers(0, 5, 18).astype(float)
    drawn = np.random.default_rng(seed).integers(6, size=(1, 6))[0]
    rows = np.concatenate([np.flatnonzero(groups == group) for group in drawn])
    expected = by_folds(scores[rows], positive[rows], folds[rows])
    found = resampled(scores[None], positive, folds, groups, 1, seed)
    np.testing.assert_allclose(found[0, 0], expected)


def test_the_band_of_noise_covers_one_half_at_all_rows_at_once_about_as_often_as_it_says() -> None:
    random, held, pointwise = np.random.default_rng(0), 0, 0
    groups, positive, folds = np.repeat(np.arange(40), 4), np.arange(160) % 2 == 0, np.repeat(np.arange(40), 4) % 5
    for trial in range(60):
        scores = random.normal(size=(12, 160))
        samples = resampled(scores, positive, folds, groups, 200, trial)
        estimates = by_folds(scores, positive, folds)
        bounds = band(estimates, samples, 40)
        held += all(one.low is not None and one.high is not None and one.low <= 0.5 <= one.high for one in bounds)
        each = [interval(float(at), own, 40) for at, own in zip(estimates, samples, strict=True)]
        pointwise += all(one.low is not None and one.high is not None and one.low <= 0.5 <= one.high for one in each)
    assert held >= 50
    assert pointwise < held


def test_fewer_than_twenty_groups_have_no_interval_and_the_reason() -> None:
    samples = np.full((2, 100), 0.7)
    for one in [interval(0.7, samples[0], 19), *band(np.array([0.7, 0.7]), samples, 19)]:
        assert (one.low, one.high) == (None, None)
        assert one.reasons("auroc") == dict.fromkeys(("auroc_low", "auroc_high"), "19 groups; an interval needs 20")
    assert interval(0.7, samples[0], 20).reason is None


def test_a_perfect_auroc_is_not_certain() -> None:
    low, high, _ = interval(1.0, np.ones(100), 40)
    assert low is not None
    assert 0.85 < low < 1 == high


def test_scores_that_are_all_equal_have_a_band_at_one_half() -> None:
    samples = np.stack([np.full(100, 0.5), np.ones(100), np.random.default_rng(0).normal(0.7, 0.1, 100)])
    tied, perfect, other = band(np.array([0.5, 1.0, 0.7]), samples, 40)
    assert (tied.low, tied.high) == (0.5, 0.5)
    assert perfect.low is not None
    assert 0.8 < perfect.low < 1 == perfect.high
    assert other.low is not None
    assert other.low < 0.7


def test_platt_is_a_logistic_regression_on_the_score() -> None:
    random = np.random.default_rng(0)
    scores, noise = random.normal(3, 7, 4000), random.logistic(size=4000)
    positive = 0.4 * scores - 2 + noise > 0
    model = LogisticRegression(C=np.inf).fit(scores[:, None], positive)
    assert platt(scores, positive) == pytest.approx((model.coef_[0, 0], model.intercept_[0]), rel=0.01)
    slope, offset = platt(np.array([-1.0, -2.0, 1.0, 2.0]), np.array([False, False, True, True]))
    assert 0 < slope < 10  # scores that separate do not make it certain
    assert abs(offset) < 1e-6


def test_bins_of_calibration_have_equal_mass() -> None:
    probabilities = np.linspace(0, 1, 1000) ** 3
    found = bins(probabilities, np.arange(1000) % 2 == 0)
    assert [one.weight for one in found] == [0.1] * 10
    assert [one.rate for one in found] == [0.5] * 10


def test_recall_at_one_percent_needs_negatives_and_groups() -> None:
    positive = np.arange(1000) % 2 == 0
    assert rare(positive, 100) is None
    assert rare(positive, 99) == "500 negatives in 99 groups; 500 in 100 are needed"
    assert rare(positive[:-1] | (np.arange(999) == 1), 100) == "498 negatives in 100 groups; 500 in 100 are needed"
