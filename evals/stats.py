"""Intervals for accuracies and for the difference between two conditions over the same problems."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Z95 = 1.959963984540054  # normal quantile of a two-sided 95% interval
FINEST = 240  # the smallest unit of differences is 1 / this


def proportion(hits: int, total: int) -> dict[str, Any]:
    """An accuracy, its standard error and 95% Wilson interval; None where there was nothing to count."""
    if total == 0:
        return {"correct": 0, "of": 0, "accuracy": None, "stderr": None, "ci95": None}
    p = hits / total
    stderr = math.sqrt(p * (1 - p) / total)
    return {"correct": hits, "of": total, "accuracy": p, "stderr": stderr, "ci95": wilson(p, total)}


def clustered(hits: Sequence[int], of: Sequence[int]) -> dict[str, Any]:
    """As `proportion`, of several answers to each problem: the standard error is of problems, which are independent.

    The interval is Wilson's for as many answers as would have that standard error, and no more than there are. Of fewer
    than two problems it is not known.

    Args:
        hits: right answers by problem.
        of: all answers by problem, at least one each.
    """
    right, total, n = sum(hits), sum(of), len(of)
    share = proportion(right, total)
    if total == n:
        return share
    if n < 2:
        return share | {"stderr": None, "ci95": None}
    p = right / total
    if all(h * total == right * k for h, k in zip(hits, of, strict=True)):
        # Problems do not differ at all: no more answers than there are problems.
        return share | {"stderr": 0.0, "ci95": wilson(p, n)}
    stderr = math.sqrt(n / (n - 1) * sum((h - p * k) ** 2 for h, k in zip(hits, of, strict=True))) / total
    return share | {"stderr": stderr, "ci95": wilson(p, min(total, p * (1 - p) / stderr**2))}


def paired_difference(a: Mapping[str, Sequence[bool]], b: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """Accuracy of b less that of a over the problems both have, of each the mean of its answers.

    `ci95` is Tango's interval. Of several answers to a problem it is that of a table of single ones with the same mean
    and variance, and not known for fewer than two problems. `p` is exact, of `sign_flip`. `only_a` and `only_b` count
    the problems of which one side has the larger share right.

    Args:
        a: whether each answer is right, by problem.
        b: the same of the other side.
    """
    shared = sorted(a.keys() & b.keys())
    if not shared:
        return {"problems": 0, "difference": None, "ci95": None, "only_a": 0, "only_b": 0, "p": None}
    exact = [Fraction(sum(b[i]), len(b[i])) - Fraction(sum(a[i]), len(a[i])) for i in shared]
    n, answers = len(shared), sum(min(len(a[i]), len(b[i])) for i in shared)
    mean, square = float(sum(exact) / n), float(sum(difference**2 for difference in exact) / n)
    return {
        "problems": n,
        "difference": mean,
        "ci95": None if n < 2 and answers > n else _tango(mean, square, n, answers),
        "only_a": sum(difference < 0 for difference in exact),
        "only_b": sum(difference > 0 for difference in exact),
        "p": sign_flip(exact),
    }


def sign_flip(differences: Sequence[Fraction]) -> float:
    """The exact two-sided p value of differences by problem: a fair coin decides the sign of each.

    Of differences of -1, 0 and 1 this is McNemar's test. Differences that have no common unit above 1/240 are rounded
    to that, which leaves the test exact.
    """
    unit = min(math.lcm(*(difference.denominator for difference in differences)), FINEST)
    steps = [round(difference * unit) for difference in differences]
    common = math.gcd(*steps) or 1
    steps = [step // common for step in steps]
    top, chances = 0, np.zeros(sum(map(abs, steps)) + 1)  # of each sum of those steps that go up
    chances[0] = 1
    for step in filter(None, map(abs, steps)):
        half = chances[: top + 1] / 2
        chances[: top + 1] = half
        chances[step : top + step + 1] += half
        top += step
    return min(1.0, 2 * float(chances[(top + abs(sum(steps))) // 2 :].sum()))


def pass_at(k: int, hits: Sequence[int], of: Sequence[int]) -> float | None:
    """The chance that at least one of k answers is right, over the problems with k or more; None without any.

    The unbiased estimate of Chen et al. (2021), 1 - C(n - c, k) / C(n, k).
    """
    chances = [1 - math.comb(n - c, k) / math.comb(n, k) for c, n in zip(hits, of, strict=True) if n >= k]
    return sum(chances) / len(chances) if chances else None


def holm(values: Sequence[float | None]) -> list[float | None]:
    """P values corrected for how many there are, as Holm (1979): each stands for itself, at any joint level."""
    order = sorted((p, place) for place, p in enumerate(values) if p is not None)
    corrected: list[float | None] = [None] * len(values)
    least = 0.0
    for rank, (p, place) in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p))
        corrected[place] = least
    return corrected


def wilson(p: float, n: float, width: float = Z95) -> list[float]:
    """The interval of a share p of n observations, 95% by default; `width` is its half in standard errors."""
    z2 = width**2
    center = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = width * math.sqrt(p * (1 - p) / n + z2 / (4 * n**2)) / (1 + z2 / n)
    return [max(0.0, min(p, center - half)), min(1.0, max(p, center + half))]


def _tango(mean: float, square: float, problems: int, answers: int) -> list[float]:
    """The 95% score interval of a difference: all differences that McNemar's score keeps.

    Tango (1998), Statistics in Medicine 17, 891-908. It has a width also where no problem, or every one, differs. It is
    of a table of single answers, in which a share of problems that equals the mean square of the differences differs.
    Means of several answers may have a smaller mean square than any table with their mean. Then the table has more
    problems, so that the mean's variance is theirs, but no more than there are answers.
    """
    n, apart = float(problems), square
    if square < abs(mean):
        apart, variance = abs(mean), square - mean**2
        n = min(answers, problems * (apart - mean**2) / variance) if variance > 1e-12 else answers
    only_a, only_b = n * (apart - mean) / 2, n * (apart + mean) / 2
    return [min(mean, -_upper(only_b, only_a, n)), max(mean, _upper(only_a, only_b, n))]


def _upper(only_a: float, only_b: float, n: float) -> float:
    """The upper bound of b less a, of n problems of which `only_a` and `only_b` one side alone has right."""
    low, high = (only_b - only_a) / n, 1.0
    if low >= high:
        return high
    for _ in range(60):  # halvings: below what a float tells apart
        middle = (low + high) / 2
        low, high = (middle, high) if _score(only_a, only_b, n, middle) > -Z95 else (low, middle)
    return high


def _score(only_a: float, only_b: float, n: float, difference: float) -> float:
    """How many standard errors the counts lie above a true difference; McNemar's z where that is 0."""
    # The likeliest share of problems that a alone has right, given the difference.
    linear = (2 * n + only_a - only_b) * difference - only_a - only_b
    root = math.sqrt(linear**2 + 8 * n * only_a * difference * (1 - difference))
    variance = 2 * (root - linear) / (4 * n) + difference * (1 - difference)
    return (only_b - only_a - n * difference) / math.sqrt(n * variance)


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
