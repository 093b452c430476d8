"""Intervals for accuracies and for the difference between two conditions over the same problems."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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


def paired_difference(a: Mapping[str, bool], b: Mapping[str, bool]) -> dict[str, Any]:
    """Accuracy of b less that of a over the problems both have, with Tango's 95% interval; `p` is McNemar's, exact."""
    shared = a.keys() & b.keys()
    if not shared:
        return {"problems": 0, "difference": None, "ci95": None, "only_a": 0, "only_b": 0, "p": None}
    only_a = sum(a[i] and not b[i] for i in shared)
    only_b = sum(b[i] and not a[i] for i in shared)
    n = len(shared)
    return {
        "problems": n,
        "difference": (only_b - only_a) / n,
        "ci95": [-_upper(only_b, only_a, n), _upper(only_a, only_b, n)],
        "only_a": only_a,
        "only_b": only_b,
        "p": mcnemar(only_a, only_b),
    }


def clustered(hits: Sequence[int], of: Sequence[int]) -> dict[str, Any]:
    """As `proportion`, of several answers to each problem: the standard error is of problems, which are independent.

    The interval is Wilson's for as many answers as would have that standard error.

    Args:
        hits: right answers by problem.
        of: all answers by problem, at least one each.
    """
    right, total, n = sum(hits), sum(of), len(of)
    found = proportion(right, total)
    if total == n or n < 2:
        return found
    p = right / total
    stderr = math.sqrt(n / (n - 1) * sum((h - p * k) ** 2 for h, k in zip(hits, of, strict=True))) / total
    effective = p * (1 - p) / stderr**2 if stderr else n  # all right or all wrong: no more than there are problems
    center = (p + Z95**2 / (2 * effective)) / (1 + Z95**2 / effective)
    half = Z95 * math.sqrt(p * (1 - p) / effective + Z95**2 / (4 * effective**2)) / (1 + Z95**2 / effective)
    return found | {"stderr": stderr, "ci95": [max(0.0, center - half), min(1.0, center + half)]}


def clustered_difference(a: Mapping[str, Sequence[bool]], b: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """As `paired_difference`, of several answers to each problem: of their means, with a normal interval and p.

    `only_a` and `only_b` count the problems of which one side has the larger share right.
    """
    shared = a.keys() & b.keys()
    if all(len(a[i]) == len(b[i]) == 1 for i in shared):
        return paired_difference({i: a[i][0] for i in shared}, {i: b[i][0] for i in shared})
    each = np.array([sum(b[i]) / len(b[i]) - sum(a[i]) / len(a[i]) for i in sorted(shared)])
    mean, n = float(each.mean()), len(each)
    stderr = float(each.std(ddof=1) / math.sqrt(n)) if n > 1 else math.inf
    known = 0 < stderr < math.inf
    return {
        "problems": n,
        "difference": mean,
        "ci95": [max(-1.0, mean - Z95 * stderr), min(1.0, mean + Z95 * stderr)],
        "only_a": int((each < 0).sum()),
        "only_b": int((each > 0).sum()),
        "p": math.erfc(abs(mean) / stderr / math.sqrt(2)) if known else 1.0,
    }


def pass_at(k: int, hits: Sequence[int], of: Sequence[int]) -> float | None:
    """The chance that at least one of k answers is right, over the problems with k or more; None without any.

    The unbiased estimate of Chen et al. (2021), 1 - C(n - c, k) / C(n, k).
    """
    chances = [1 - math.comb(n - c, k) / math.comb(n, k) for c, n in zip(hits, of, strict=True) if n >= k]
    return sum(chances) / len(chances) if chances else None


def holm(values: Sequence[float | None]) -> list[float | None]:
    """P values corrected for how many there are, as Holm (1979): each stands for itself, at any joint level."""
    order = sorted((p, place) for place, p in enumerate(values) if p is not None)
    found: list[float | None] = [None] * len(values)
    least = 0.0
    for rank, (p, place) in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p))
        found[place] = least
    return found


def _upper(only_a: int, only_b: int, n: int) -> float:
    """The upper bound of the 95% score interval of b less a: the largest difference that McNemar's score keeps.

    Tango (1998), Statistics in Medicine 17, 891-908. It has a width also where no problem, or every one, differs.
    """
    low, high = (only_b - only_a) / n, 1.0
    if low == high:
        return high
    for _ in range(60):  # halvings: below what a float tells apart
        middle = (low + high) / 2
        low, high = (middle, high) if _score(only_a, only_b, n, middle) > -Z95 else (low, middle)
    return high


def _score(only_a: int, only_b: int, n: int, difference: float) -> float:
    """How many standard errors the counts lie above a true difference; McNemar's z where that is 0."""
    # The likeliest share of problems that a alone has right, given the difference.
    linear = (2 * n + only_a - only_b) * difference - only_a - only_b
    root = math.sqrt(linear**2 + 8 * n * only_a * difference * (1 - difference))
    variance = 2 * (root - linear) / (4 * n) + difference * (1 - difference)
    return (only_b - only_a - n * difference) / math.sqrt(n * variance)


def mcnemar(only_a: int, only_b: int) -> float:
    """The exact two-sided p value of McNemar's test: a fair coin for each problem that one side alone has right."""
    n, fewer = only_a + only_b, min(only_a, only_b)
    ways, tail = 1, 1  # n over 0
    for k in range(fewer):
        ways = ways * (n - k) // (k + 1)
        tail += ways
    return min(1.0, 2 * tail / (1 << n))


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """Median and 95th percentile."""
    if not len(values):
        return {"p50": None, "p95": None}
    p50, p95 = np.percentile(values, [50, 95])
    return {"p50": float(p50), "p95": float(p95)}


def covered(started: Sequence[float], ended: Sequence[float]) -> float:
    """Seconds in which at least one of the intervals `started[i]` to `ended[i]` ran: a pause does not count."""
    if not len(started):
        return 0.0
    order = np.argsort(started)
    begins: npt.NDArray[np.float64] = np.asarray(started)[order]
    ends: npt.NDArray[np.float64] = np.maximum.accumulate(np.asarray(ended)[order])
    pauses = np.maximum(begins[1:] - ends[:-1], 0.0)
    return float(ends[-1] - begins[0] - pauses.sum())
