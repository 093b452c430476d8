"""Probes of one point: nested cross-validation of each method, its calibration, and its null."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from deployments.activations.reader.row_index import RowIndex
from evals.auroc import auroc, by_folds
from evals.probes.fitting.folds import Folds
from evals.probes.fitting.score_figures import platt
from evals.probes.fitting.solver import Method, solve
from evals.probes.inputs.features import features, largest, standardized

_PRECISE = 1 << 23  # numbers up to which rows are float64
_LOGITS = 1 << 25  # numbers of scores in memory at once
_FALSE_POSITIVES = 0.01


@dataclass(frozen=True, eq=False)
class FitJob:
    """What every point is probed for; it travels to other processes.

    Attributes:
        index: Where the rows lie.
        ranges: By choice of tokens, each example's rows of it, `[n, 2]`.
        positive: Each example's class, bool `[n]`.
        folds: The folds.
        permuted: Labelings for the null, bool `[p, n]`.
        methods: What is fitted.
        penalties: Inverse C, from strong to weak, `[c]`.
    """

    index: RowIndex
    ranges: dict[str, np.ndarray]
    positive: np.ndarray
    folds: Folds
    permuted: np.ndarray
    methods: tuple[Method, ...]
    penalties: np.ndarray


class Calibration(NamedTuple):
    """From a score to log odds by slope and offset; `threshold` is the score that 1% of the negatives exceed."""

    slope: float
    offset: float
    threshold: float


class Selected(NamedTuple):
    """Scores of a nested cross-validation over C.

    Attributes:
        held_out: Each example's score by the fit without its fold, of the C that the inner folds chose, `[n]`.
        chosen: Which C each outer fold's inner folds chose, `[folds]`.
        inner: Its AUROC in the inner folds, `[folds]`.
        calibrations: Each outer fold's, from the inner folds' held-out scores.
        best: Which C all folds together choose.
        score: Its AUROC.
        calibration: Of a probe of all examples, from the outer folds' held-out scores.
    """

    held_out: np.ndarray
    chosen: np.ndarray
    inner: np.ndarray
    calibrations: list[Calibration]
    best: int
    score: float
    calibration: Calibration


class Outcome(NamedTuple):
    """One point, choice of tokens and method; `null` is the AUROC of each permuted labeling, `[p]`."""

    point: str
    tokens: str
    method: Method
    selected: Selected
    null: np.ndarray


class Probe(NamedTuple):
    """A probe in numbers: the score of a row is `weight . (row - mean) / std + bias`; `[hidden]` but for the bias."""

    weight: np.ndarray
    bias: float
    mean: np.ndarray
    std: np.ndarray

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Scores of `[n, hidden]`."""
        found: np.ndarray = ((rows - self.mean) / self.std) @ self.weight + self.bias
        return found


class Rows:
    """The examples at one point and choice of tokens, in memory."""

    def __init__(self, index: RowIndex, point: str, tokens: str, ranges: np.ndarray) -> None:
        self._where = index, point, ranges
        self._maximum = tokens == "max"
        self._rows, self._mean, self._std = standardized(features(index, point, ranges))
        if self._rows.numel() <= _PRECISE:
            self._rows = self._rows.double()

    def logits(self, method: Method, mask: torch.Tensor, labels: np.ndarray, penalty: np.ndarray) -> np.ndarray:
        """Scores of all examples by every fit, `[fits, n, k]`.

        Args:
            method: The method.
            mask: Which examples each fit is trained on, bool `[fits, n]`.
            labels: `[n, k]`.
            penalty: Inverse C, `[fits or 1, k or 1]`.
        """
        found = solve(
            method, self._rows, mask, torch.from_numpy(labels), torch.from_numpy(penalty), weights=self._maximum
        )
        if not self._maximum:
            return found.logits
        assert found.weights is not None
        scaled = found.weights / (found.std * self._std)[:, :, None]  # [fits, hidden, k]
        bias = found.bias - np.einsum("fh,fhk->fk", found.mean * self._std + self._mean, scaled)
        fits, hidden, k = scaled.shape
        flat = largest(*self._where, scaled.transpose(1, 0, 2).reshape(hidden, -1), bias.reshape(-1))
        return flat.reshape(-1, fits, k).transpose(1, 0, 2)

    def scores(self, probe: Probe) -> np.ndarray:
        """A probe's scores of all examples, `[n]`."""
        scaled = probe.weight / probe.std
        bias = probe.bias - probe.mean @ scaled
        return (
            largest(*self._where, scaled[:, None], np.array([bias]))[:, 0]
            if self._maximum
            else (self._rows.numpy() @ (scaled * self._std) + (bias + self._mean @ scaled))
        )

    def probe(self, method: Method, training: torch.Tensor, positive: np.ndarray, penalty: float) -> Probe:
        """One fit of the examples that bool `[n]` chooses."""
        labels = torch.from_numpy(positive[:, None])
        found = solve(method, self._rows, training[None], labels, torch.tensor([[penalty]]), weights=True)
        assert found.weights is not None
        mean, std = found.mean[0] * self._std + self._mean, found.std[0] * self._std
        return Probe(found.weights[0, :, 0], float(found.bias[0, 0]), mean, std)


def probe_point(job: FitJob, point: str) -> list[Outcome]:
    """Cross-validate every choice of tokens and method at a point.

    Raises:
        EvalError: Rows are not finite.
    """
    outcomes = []
    for tokens, ranges in job.ranges.items():
        rows = Rows(job.index, point, tokens, ranges)
        for method in job.methods:
            penalties = penalties_of(job, method)
            labels = np.repeat(job.positive[:, None], len(penalties), axis=1)
            selected = select(rows.logits(method, job.folds.mask, labels, penalties[None]), job.positive, job.folds)
            chosen = penalties[selected.chosen][:, None]
            outcomes.append(Outcome(point, tokens, method, selected, _null(job, rows, method, chosen)))
    return outcomes


def penalties_of(job: FitJob, method: Method) -> np.ndarray:
    """The penalties that a method chooses from: the difference of means has none."""
    return job.penalties[:1] if method == "difference" else job.penalties


def select(logits: np.ndarray, positive: np.ndarray, folds: Folds) -> Selected:
    """Choose a column for each outer fold in its inner folds, and calibrate it there.

    Args:
        logits: Scores by the fits of `folds`, `[fits, n, k]`; the first of equally good columns is chosen.
        positive: Bool `[n]`.
        folds: The folds.
    """
    count = folds.count
    areas = np.zeros((count, count, logits.shape[2]))  # of the outer fold i: in fold j
    pairs = np.zeros(count)
    for j in range(count):
        rows = folds.of == j
        scores = logits[folds.fit[:, j]][:, rows].transpose(0, 2, 1)  # [folds, k, rows]
        areas[:, j], found = auroc(scores, positive[rows])
        pairs[j] = found[0, 0]
    own = areas[np.arange(count), np.arange(count)]  # [folds, k]
    inner = ((areas * pairs[:, None]).sum(axis=1) - own * pairs[:, None]) / (pairs.sum() - pairs)[:, None]
    chosen = inner.argmax(axis=1)
    outer = (own * pairs[:, None]).sum(axis=0) / pairs.sum()
    best, every = int(outer.argmax()), np.arange(len(positive))
    calibrations = []
    for i in range(count):
        rest = np.flatnonzero(folds.of != i)
        calibrations.append(_calibration(logits[folds.fit[i, folds.of[rest]], rest, chosen[i]], positive[rest]))
    return Selected(
        held_out=logits[folds.of, every, chosen[folds.of]].astype(np.float32),
        chosen=chosen,
        inner=inner.max(axis=1),
        calibrations=calibrations,
        best=best,
        score=float(outer[best]),
        calibration=_calibration(logits[folds.of, every, best], positive),
    )


def labelings(
    job: FitJob, rows: Rows, method: Method, penalty: float, labels: np.ndarray, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores of probes of other labels, one C, calibrated as those of the real ones.

    Args:
        job: The job.
        rows: The examples.
        method: The method.
        penalty: Inverse C.
        labels: Bool `[p, n]`.
        wanted: The outer folds that are wanted.

    Returns:
        Scores, probabilities, and whether each score is above its threshold, `[p, n]` each; of examples in other folds
        they are 0.
    """
    found = np.zeros((3, *labels.shape))
    size = max(1, _LOGITS // job.folds.mask.numel())
    for first in range(0, len(labels), size):
        some = labels[first : first + size]
        logits = rows.logits(method, job.folds.mask, some.T, np.array([[penalty]]))
        for column, positive in enumerate(some):
            for fold in wanted:
                of, rest = np.flatnonzero(job.folds.of == fold), np.flatnonzero(job.folds.of != fold)
                own = logits[job.folds.fit[fold, job.folds.of[rest]], rest, column]
                scores = logits[fold, of, column]
                found[:, first + column, of] = calibrated(scores, _calibration(own, positive[rest]))
    return found[0], found[1], found[2].astype(bool)


def calibrated(scores: np.ndarray, by: Calibration) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, their probabilities, and whether they are above the threshold, `[n]` each."""
    return scores, probability(scores, by), scores > by.threshold


def probability(scores: np.ndarray, by: Calibration) -> np.ndarray:
    """Of the positive class."""
    found: np.ndarray = 1 / (1 + np.exp(-np.clip(by.slope * scores + by.offset, -700, 700)))
    return found


def _calibration(scores: np.ndarray, positive: np.ndarray) -> Calibration:
    scores = scores.astype(np.float64)
    threshold = np.quantile(scores[~positive], 1 - _FALSE_POSITIVES, method="higher") if (~positive).any() else np.inf
    return Calibration(*platt(scores, positive), float(threshold))


def _null(job: FitJob, rows: Rows, method: Method, penalty: np.ndarray) -> np.ndarray:
    """AUROC of probes of the permuted labels, each outer fold with the C of the real ones, `[p]`."""
    count, every = job.folds.count, np.arange(len(job.positive))
    size = max(1, _LOGITS // (count * len(every)))
    found = [np.empty(0)]
    for first in range(0, len(job.permuted), size):
        some = job.permuted[first : first + size]
        logits = rows.logits(method, job.folds.mask[:count], some.T, penalty)
        found.append(by_folds(logits[job.folds.of, every].T, some, job.folds.of))
    return np.concatenate(found)
