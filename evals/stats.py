"""Intervals for accuracies and for the difference between two modes over the same problems."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Z95 = 1.959963984540054  # normal quantile of a two-sided 95% interval


def proportion(hits: int, total: int) -> dict[str, Any]:
    """An accuracy, its standard error and 95% Wilson interval; None where there was nothing to count."""
    if total == 0:
        return {"correct": 0, "of": 0, "accuracy": None, "stderr": None, "ci95": None}
    p, z2 = hits / total, Z95**2
    center = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 * math.sqrt(p * (1 - p) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    return {
        "correct": hits,
        "of": total,
        "accuracy": p,
        "stderr": math.sqrt(p * (1 - p) / total),
        "ci95": [max(0.0, center - half), min(1.0, center + half)],
    }


def paired_difference(
    a: dict[str, bool], b: dict[str, bool], *, seed: int = 0, resamples: int = 10_000
) -> dict[str, Any]:
    """Accuracy of b less that of a over the problems both have, with a bootstrap interval by problem.

    A problem's difference is -1, 0 or 1, so drawing problems with replacement is one multinomial draw.
    """
    shared = a.keys() & b.keys()
    if not shared:
        return {"problems": 0, "difference": None, "ci95": None, "only_a": 0, "only_b": 0}
    only_a = sum(a[i] and not b[i] for i in shared)
    only_b = sum(b[i] and not a[i] for i in shared)
    n = len(shared)
    draws = np.random.default_rng(seed).multinomial(
        n, [only_a / n, only_b / n, (n - only_a - only_b) / n], size=resamples
    )
    low, high = np.percentile((draws[:, 1] - draws[:, 0]) / n, [2.5, 97.5])
    return {
        "problems": n,
        "difference": (only_b - only_a) / n,
        "ci95": [float(low), float(high)],
        "only_a": only_a,
        "only_b": only_b,
    }


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """Median and 95th percentile."""
    if not values:
        return {"p50": None, "p95": None}
    p50, p95 = np.percentile(values, [50, 95])
    return {"p50": float(p50), "p95": float(p95)}
