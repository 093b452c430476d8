"""Figures of held-out scores: calibration, and thresholds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit
from sklearn.metrics import balanced_accuracy_score, brier_score_loss

from evals.auroc import by_folds

_RARE = (500, 100)  # negatives and groups below which recall at 1% false positives has no meaning
_BINS = 10
_PLATT_STEPS = 100


def platt(logits: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """Slope and offset that turn scores into the log odds of the positive class.

    Platt, Probabilistic Outputs for Support Vector Machines (1999), with its targets a little inside 0 and 1.

    Args:
        logits: `[n]`.
        positive: Bool `[n]`.
    """
    yes, no = int(positive.sum()), int((~positive).sum())
    target = np.where(positive, (yes + 1) / (yes + 2), 1 / (no + 2))
    center, scale = float(logits.mean()), float(logits.std()) or 1.0
    rows = np.stack([(logits - center) / scale, np.ones(len(logits))], axis=1)

    def loss(at: np.ndarray) -> float:
        return float(np.logaddexp(0, rows @ at).sum() - target @ (rows @ at))

    found = np.array([0.0, np.log((yes + 1) / (no + 1))])
    for _ in range(_PLATT_STEPS):
        chance = expit(rows @ found)
        slope = rows.T @ (chance - target)
        curvature = (rows * (chance * (1 - chance))[:, None]).T @ rows + 1e-12 * np.eye(2)
        step, size, start = np.linalg.solve(curvature, slope), 1.0, loss(found)
        if slope @ step < 1e-12:
            break
        while loss(found - size * step) > start - 1e-4 * size * (slope @ step) and size > 1e-9:
            size /= 2
        found = found - size * step
    return float(found[0] / scale), float(found[1] - found[0] * center / scale)


def figures(
    logits: np.ndarray, probabilities: np.ndarray, above: np.ndarray, positive: np.ndarray, folds: np.ndarray
) -> dict[str, float]:
    """All figures of held-out scores.

    Args:
        logits: `[n]`.
        probabilities: The same, calibrated in the training folds, `[n]`.
        above: Whether each is above the score that 1% of the negatives of its training folds exceed, bool `[n]`.
        positive: Bool `[n]`.
        folds: Each example's fold, `[n]`.
    """
    likelier = probabilities > 0.5
    return {
        "auroc": float(by_folds(logits, positive, folds)),
        "balanced_accuracy": float(balanced_accuracy_score(positive, likelier)),
        "brier": float(brier_score_loss(positive, probabilities)),
        "calibration_error": sum(one.weight * abs(one.mean - one.rate) for one in bins(probabilities, positive)),
        "recall_at_1_fpr": float(above[positive].mean()),
    }


def rare(positive: np.ndarray, groups: int) -> str | None:
    """Why there is no recall at 1% false positives; None where there is."""
    negatives = int((~positive).sum())
    if negatives >= _RARE[0] and groups >= _RARE[1]:
        return None
    return f"{negatives} negatives in {groups} groups; {_RARE[0]} in {_RARE[1]} are needed"


class Bin(NamedTuple):
    """Examples of near probabilities: their mean, the share of positives, and the bin's share of all."""

    mean: float
    rate: float
    weight: float


def bins(probabilities: np.ndarray, positive: np.ndarray) -> list[Bin]:
    """Ten bins of equal mass by probability."""
    order = np.argsort(probabilities, kind="stable")
    parts = [part for part in np.array_split(order, _BINS) if len(part)]
    return [Bin(float(probabilities[p].mean()), float(positive[p].mean()), len(p) / len(order)) for p in parts]


def finite(value: Any) -> float | None:
    """A number for JSON: None in place of what is not finite."""
    return float(value) if np.isfinite(value) else None
