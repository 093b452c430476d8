"""Readouts against outcomes: a sample's score, AUROC by condition, and the spread of tokens' values."""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from evals.auroc import area, interval
from evals.task.trajectory import Sample

SCORES = ("mean", "last")  # of a sample: over the generated tokens of all turns, and at the very last of them


class _Scored(NamedTuple):
    """A sample's scores, `[labels]` each; `nan` where there is none."""

    problem: str
    correct: bool
    mean: np.ndarray
    last: np.ndarray


class _Spread:
    """Sums over the finite values of tokens, `[labels]` each."""

    def __init__(self, labels: int) -> None:
        self._count, self._sum, self._squares = np.zeros((3, labels))

    def add(self, rows: np.ndarray) -> None:
        finite = np.isfinite(rows)
        known = np.where(finite, rows, 0.0)
        self._count += finite.sum(axis=0)
        self._sum += known.sum(axis=0)
        self._squares += (known**2).sum(axis=0)

    def of(self, place: int) -> dict[str, Any]:
        count = int(self._count[place])
        if not count:
            return {"tokens": 0, "mean": None, "sd": None}
        mean = self._sum[place] / count
        variance = max(0.0, self._squares[place] / count - mean**2)
        return {"tokens": count, "mean": float(mean), "sd": math.sqrt(variance)}


class ReadoutTally:
    """The values of a run's readouts, a few numbers for each sample."""

    def __init__(self, described: dict[str, dict[str, Any]]) -> None:
        """Initializes all counts at 0.

        Args:
            described: what config.json has of each readout.
        """
        self._labels = {name: _labels(one) for name, one in described.items()}
        self._spreads = {name: _Spread(len(labels)) for name, labels in self._labels.items()}
        self._scored: defaultdict[tuple[str, str, str], list[_Scored]] = defaultdict(list)

    def add(self, sample: Sample) -> None:
        """Counts one sample; one that failed, or has no values, has no part in it."""
        turns = [turn.readouts.values for turn in sample.turns if turn.readouts]
        if sample.correct is None or not turns:
            return
        for name in self._labels:
            parts = [np.array(values[name], dtype=np.float64) for values in turns if values.get(name)]
            if not parts:
                continue
            rows = np.concatenate(parts)
            self._spreads[name].add(rows)
            finite = np.isfinite(rows)
            total, count = np.where(finite, rows, 0.0).sum(axis=0), finite.sum(axis=0)
            mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
            one = _Scored(sample.id, sample.correct, mean, rows[-1])
            self._scored[sample.mode, sample.variant, name].append(one)

    def summary(self) -> dict[str, Any]:
        """The readouts' part of summary.json."""
        return {
            "tokens": [
                {"readout": name, "label": label, "place": place} | self._spreads[name].of(place)
                for name, labels in self._labels.items()
                for place, label in enumerate(labels)
            ],
            "auroc": [
                {"mode": mode, "variant": variant, "readout": name, "label": label} | _areas(scored, place)
                for (mode, variant, name), scored in self._scored.items()
                for place, label in enumerate(self._labels[name])
            ],
        }


def _labels(described: dict[str, Any]) -> list[str | None]:
    """What the values of a readout are of; None where there is one alone."""
    many = described.get("values") or 1
    return [None] if many == 1 else described.get("labels") or [str(place) for place in range(many)]


def _areas(scored: list[_Scored], place: int) -> dict[str, Any]:
    correct = np.array([one.correct for one in scored])
    problems = np.array([one.problem for one in scored])
    return {
        which: _area(np.array([getattr(one, which)[place] for one in scored]), correct, problems) for which in SCORES
    }


def _area(scores: np.ndarray, correct: np.ndarray, problems: np.ndarray) -> dict[str, Any]:
    """AUROC against the outcome, with an interval of problems; `why_not` says why a part of it is None."""
    finite = np.isfinite(scores)
    scores, correct, problems = scores[finite], correct[finite], problems[finite]
    found = {"samples": len(scores), "correct": int(correct.sum()), "auroc": None, "ci95": None, "why_not": None}
    if not len(scores):
        return found | {"why_not": "no sample has a value"}
    if correct.all() or not correct.any():
        return found | {"why_not": "every answer is right" if correct.all() else "no answer is right"}
    own = area(scores, correct, problems)
    low, high, reason = interval(own)
    return found | {"auroc": own.value, "ci95": None if reason else [low, high], "why_not": reason}
