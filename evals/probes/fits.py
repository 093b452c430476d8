"""Probes of one point: scikit-learn's fits in nested cross-validation, and their null."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement
from typing import Literal, NamedTuple, get_args

import numpy as np
from scipy.stats import rankdata
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

from deployments.activations.reader.row_index import RowIndex
from evals.probes.features import features

Method = Literal["difference", "logistic", "ridge"]
METHODS: tuple[Method, ...] = get_args(Method)
_STEPS = 300  # of L-BFGS; only fits with a weak penalty, which are rarely chosen, need more


@dataclass(frozen=True, eq=False)
class FitJob:
    """What every point is probed for."""

    index: RowIndex  # where the rows lie
    ranges: dict[str, np.ndarray]  # by choice of tokens, each example's rows of it, `[n, 2]`
    positive: np.ndarray  # each example's class, bool `[n]`
    folds: np.ndarray  # each example's fold, `[n]`
    permuted: np.ndarray  # labelings for the null, bool `[p, n]`
    methods: tuple[Method, ...]  # what is fitted
    c: tuple[float, ...]  # values of C, ascending

    def settings(self, method: Method) -> np.ndarray:
        """The values of C that a method chooses from: the difference of means has none, which is 1 here."""
        return np.array(self.c if method != "difference" else [1.0])


class Selected(NamedTuple):
    """Scores of a nested cross-validation over settings."""

    # each example's score by the fit without its fold, of the setting that the inner folds chose, `[n]`
    held_out: np.ndarray
    probabilities: np.ndarray  # those scores calibrated by the inner folds' held-out scores, `[n]`
    chosen: np.ndarray  # which setting each outer fold's inner folds chose, `[folds]`
    inner: np.ndarray  # its AUROC in the inner folds, `[folds]`
    best: int  # which setting all folds together choose
    score: float  # its AUROC
    calibration: tuple[float, float]  # from its held-out scores to log odds: slope and offset


class Outcome(NamedTuple):
    """One point, choice of tokens and method; `null` is the AUROC of each permuted labeling by fold, `[folds, p]`."""

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
        scores: np.ndarray = ((rows - self.mean) / self.std) @ self.weight + self.bias
        return scores


class Standardized:
    """All rows, standardized by some of them, on which probes are then fitted.

    With fewer of those than features, rows are projected onto the space that those span. A fit with an L2 penalty has
    its weights there, so it stays the same, and takes a fraction of the time.
    """

    def __init__(self, rows: np.ndarray, training: np.ndarray) -> None:
        """Standardize.

        Args:
            rows: `[n, hidden]`.
            training: Which of them fits are trained on, bool `[n]`.
        """
        self._scaler = StandardScaler().fit(rows[training])
        self._rows, self._training = self._scaler.transform(rows), training
        self._basis: np.ndarray | None = None
        if training.sum() < rows.shape[1]:
            self._basis = np.linalg.qr(self._rows[training].T)[0]  # [hidden, training rows]
            self._rows = self._rows @ self._basis

    def scores(self, method: Method, labels: np.ndarray, c: np.ndarray) -> np.ndarray:
        """Scores of all rows, `[n, k]`, by a fit for each labeling, bool `[n, k]`, with its C, `[k]`."""
        weights, bias = _fit(method, self._rows[self._training], labels[self._training], c)
        scores: np.ndarray = self._rows @ weights.astype(self._rows.dtype) + bias
        return scores

    def probe(self, method: Method, positive: np.ndarray, c: float) -> Probe:
        """One fit."""
        labels = positive[self._training, None]
        weights, bias = _fit(method, self._rows[self._training], labels, np.array([c]))
        weight = weights[:, 0] if self._basis is None else self._basis @ weights[:, 0]
        return Probe(weight, float(bias[0]), self._scaler.mean_, self._scaler.scale_)


def probe_point(job: FitJob, point: str) -> list[Outcome]:
    """Cross-validate every choice of tokens and method at a point.

    Raises:
        EvalError: Rows are not finite.
    """
    outcomes = []
    of, positive = job.folds, job.positive
    for tokens, ranges in job.ranges.items():
        rows = features(job.index, point, ranges)
        settings = [(method, job.settings(method)) for method in job.methods]
        held = np.split(
            nested(of, partial(_scores, rows, positive, settings)),
            np.cumsum([len(c) for _, c in settings])[:-1],
            axis=2,
        )
        choices = [select(part, positive, of) for part in held]
        null = np.zeros((len(settings), of.max() + 1, len(job.permuted)))
        for fold in range(of.max() + 1) if len(job.permuted) else ():
            space, rest = Standardized(rows, of != fold), of == fold
            for place, ((method, c), selected) in enumerate(zip(settings, choices, strict=True)):
                chosen = np.full(len(job.permuted), c[selected.chosen[fold]])
                null[place, fold] = aurocs(space.scores(method, job.permuted.T, chosen)[rest], job.permuted.T[rest])
        outcomes += [Outcome(point, tokens, *result) for result in zip(job.methods, choices, null, strict=True)]
    return outcomes


def _scores(
    rows: np.ndarray, positive: np.ndarray, settings: list[tuple[Method, np.ndarray]], training: np.ndarray
) -> np.ndarray:
    """Scores of all rows by fits of some of them, `[n, k]`, for every method and value of C."""
    space = Standardized(rows, training)
    every = [(method, c, np.repeat(positive[:, None], len(c), axis=1)) for method, c in settings]
    return np.hstack([space.scores(method, labels, c) for method, c, labels in every])


def nested(of: np.ndarray, fit: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Scores of each example by fits without its fold and without one other, `[folds, n, k]`.

    The fit without folds i and j serves as an inner one of both, so F folds take F (F + 1) / 2 fits.

    Args:
        of: Each example's fold, `[n]`.
        fit: Gives the scores `[n, k]` of all examples by fits of those that bool `[n]` names.
    """
    count, held = int(of.max()) + 1, np.empty(0)
    for i, j in combinations_with_replacement(range(count), 2):
        scores = fit((of != i) & (of != j))
        if not held.size:
            held = np.empty((count, *scores.shape), dtype=np.float32)
        held[i, of == j], held[j, of == i] = scores[of == j], scores[of == i]
    return held


def select(held: np.ndarray, positive: np.ndarray, of: np.ndarray) -> Selected:
    """Choose a setting for each outer fold in its inner folds, and calibrate it there.

    Args:
        held: As `nested` gives it; the first of equally good settings is chosen.
        positive: Bool `[n]`.
        of: Each example's fold, `[n]`.
    """
    count, every = len(held), np.arange(len(positive))
    areas = np.array(
        [[aurocs(held[i, of == j], positive[of == j, None]) for j in range(count)] for i in range(count)]
    )  # [outer, inner, k]
    pairs = np.array([positive[of == j].sum() * (~positive[of == j]).sum() for j in range(count)], dtype=float)
    own = np.eye(count, dtype=bool)
    inner = np.average(np.where(own[:, :, None], 0, areas), axis=1, weights=pairs) / (1 - pairs / pairs.sum())[:, None]
    outer = np.average(areas[own], axis=0, weights=pairs)
    chosen, best = inner.argmax(axis=1), int(outer.argmax())
    held_out, probabilities = held[of, every, chosen[of]], np.empty(len(positive))
    for fold in range(count):
        calibration = platt(held[fold, of != fold, chosen[fold]], positive[of != fold])
        probabilities[of == fold] = probability(held_out[of == fold], calibration)
    calibration = platt(held[of, every, best], positive)
    return Selected(held_out, probabilities, chosen, inner.max(axis=1), best, float(outer[best]), calibration)


def aurocs(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """The AUROC of each column of scores `[n, k]` against its labels `[n, k or 1]`; 0.5 where they have one class."""
    # By ranks of all columns at once: column by column, scikit-learn's function would take longer than the fits.
    labels = np.broadcast_to(positive, scores.shape)
    yes = labels.sum(axis=0)
    pairs = yes * (len(labels) - yes)
    below = np.where(labels, rankdata(scores, axis=0), 0).sum(axis=0) - yes * (yes + 1) / 2
    areas: np.ndarray = np.where(pairs > 0, below / np.maximum(pairs, 1), 0.5)
    return areas


def platt(scores: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """Slope and offset that turn scores `[n]` into the log odds of the positive class, bool `[n]`."""
    center, scale = float(scores.mean()), float(scores.std()) or 1.0
    model = LogisticRegression().fit(((scores - center) / scale)[:, None], positive)
    slope = float(model.coef_[0, 0]) / scale
    return slope, float(model.intercept_[0]) - slope * center


def probability(scores: np.ndarray, calibration: tuple[float, float]) -> np.ndarray:
    """Of the positive class, `[n]`."""
    slope, offset = calibration
    chances: np.ndarray = 1 / (1 + np.exp(-np.clip(slope * scores.astype(np.float64) + offset, -700, 700)))
    return chances


def _fit(method: Method, rows: np.ndarray, labels: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights `[features, k]` and bias `[k]` for each labeling, bool `[m, k]`, of rows `[m, features]`."""
    if method == "difference":  # 0 halfway between the means
        yes, no = (of / np.maximum(of.sum(axis=0), 1).astype(rows.dtype) for of in (labels, ~labels))
        weights = rows.T @ (yes - no)
        return weights, -((rows @ weights) * (yes + no)).sum(axis=0) / 2
    if method == "ridge":
        model = Ridge(alpha=1 / c).fit(rows, 2.0 * labels - 1)
        return np.atleast_2d(model.coef_).T, np.atleast_1d(model.intercept_)
    weights, bias = np.zeros((rows.shape[1], len(c))), np.zeros(len(c))
    for column, positive in enumerate(labels.T):
        if 0 < positive.sum() < len(positive):  # a permuted labeling may have one class
            model = LogisticRegression(C=c[column], max_iter=_STEPS)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                model.fit(rows, positive)
            weights[:, column], bias[column] = model.coef_[0], model.intercept_[0]
    return weights, bias
