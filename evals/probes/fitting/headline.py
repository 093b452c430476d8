"""The headline: the AUROC of choosing layer, tokens, method and C inside the folds, and the probe of all examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from evals.probes.fitting.fitting import Calibration, FitJob, Outcome, Probe, Rows, calibrated, labelings, penalties_of
from evals.probes.fitting.score_figures import figures, finite, rare
from evals.probes.fitting.solver import Method

FIGURES = ("auroc", "balanced_accuracy", "brier", "calibration_error", "recall_at_1_fpr")


class ProbeChoice(NamedTuple):
    """One probe's settings."""

    point: str
    tokens: str
    method: Method
    penalty: float

    def facts(self) -> dict[str, Any]:
        """For JSON; the difference of means has no C."""
        c = None if self.method == "difference" else 1 / self.penalty
        return {"point": self.point, "tokens": self.tokens, "method": self.method, "c": c}


class Scores(NamedTuple):
    """Held-out scores, probabilities, and whether a score is above its fold's threshold, `[..., n]` each."""

    logits: np.ndarray
    probabilities: np.ndarray
    above: np.ndarray


class Headline(NamedTuple):
    """What the folds chose, and the probe that is fitted to all examples.

    Attributes:
        choices: Each outer fold's.
        held_out: Each example's scores by its fold's choice.
        calibrations: Each outer fold's.
        probes: Each outer fold's, fitted to the other folds.
        null: Scores of the permuted labelings by the same choices, `[p, n]`.
        control: Those of the control task's labelings; None with groups.
        final: The settings of the probe of all examples.
        probe: That probe.
        calibration: Its calibration.
    """

    choices: list[ProbeChoice]
    held_out: Scores
    calibrations: list[Calibration]
    probes: list[Probe]
    null: Scores
    control: Scores | None
    final: ProbeChoice
    probe: Probe
    calibration: Calibration


def choose(job: FitJob, outcomes: Sequence[Outcome], control: np.ndarray | None) -> Headline:
    """Choose in the inner folds, score in the outer ones, and fit the probe of all examples.

    Args:
        job: The job.
        outcomes: Of every point, choice of tokens and method; the first of equally good ones is chosen.
        control: Labelings of a control task, bool `[p, n]`.
    """
    n, count = len(job.positive), job.folds.count
    held_out = Scores(np.zeros(n), np.zeros(n), np.zeros(n, dtype=bool))
    choices, calibrations = list[ProbeChoice](), list[Calibration]()
    for fold in range(count):
        outcome = max(outcomes, key=lambda one: float(one.selected.inner[fold]))
        choices.append(_choice(job, outcome, int(outcome.selected.chosen[fold])))
        calibrations.append(outcome.selected.calibrations[fold])
        rows = job.folds.of == fold
        scores = calibrated(outcome.selected.held_out[rows].astype(np.float64), calibrations[-1])
        for part, values in zip(held_out, scores, strict=True):
            part[rows] = values
    best = max(outcomes, key=lambda one: one.selected.score)
    final = _choice(job, best, best.selected.best)
    return _fitted(job, choices, held_out, calibrations, final, best.selected.calibration, control)


def summary(job: FitJob, headline: Headline, groups: int) -> dict[str, Any]:
    """Figures and their null for JSON, without intervals; `reasons` says of what is null why."""
    found = _figures(job, headline.held_out, job.positive)
    null = [
        _figures(job, Scores(*(part[i] for part in headline.null)), labels) for i, labels in enumerate(job.permuted)
    ]
    control = {name: quantiles([one[name] for one in null]) for name in FIGURES}
    reasons = {} if null else {"control": "no permutations"}
    if reason := rare(job.positive, groups):
        found["recall_at_1_fpr"] = control["recall_at_1_fpr"] = None
        reasons["recall_at_1_fpr"] = reason
    facts = headline.final.facts() | {name: found[name] for name in FIGURES}
    if facts["c"] is None:
        reasons["c"] = "the difference of means has no C"
    facts["control_auroc"] = control["auroc"]["median"] if control["auroc"] else None
    facts |= {"control": control, "chosen": [{"fold": i} | one.facts() for i, one in enumerate(headline.choices)]}
    return facts | {"reasons": reasons}


def _choice(job: FitJob, outcome: Outcome, column: int) -> ProbeChoice:
    penalty = float(penalties_of(job, outcome.method)[column])
    return ProbeChoice(outcome.point, outcome.tokens, outcome.method, penalty)


def _fitted(
    job: FitJob,
    choices: list[ProbeChoice],
    held_out: Scores,
    calibrations: list[Calibration],
    final: ProbeChoice,
    calibration: Calibration,
    control: np.ndarray | None,
) -> Headline:
    """Read each point that was chosen once more: for the null, the folds' probes, and the final one."""
    n, count = len(job.positive), job.folds.count
    null, tasks = _no_scores(len(job.permuted), n), _no_scores(0 if control is None else len(control), n)
    probes, probe = dict[int, Probe](), None
    for choice in dict.fromkeys([*choices, final]):
        rows = Rows(job.index, choice.point, choice.tokens, job.ranges[choice.tokens])
        folds = np.flatnonzero([one == choice for one in choices])
        for fold in folds:
            probes[int(fold)] = rows.probe(choice.method, job.folds.mask[fold], job.positive, choice.penalty)
        for scores, labels in ((null, job.permuted), (tasks, control)):
            if labels is not None and len(folds) and len(labels):
                of = np.isin(job.folds.of, folds)
                for part, values in zip(
                    scores, labelings(job, rows, choice.method, choice.penalty, labels, folds), strict=True
                ):
                    part[:, of] = values[:, of]
        if choice == final:
            everything = job.folds.mask[0] | True
            probe = rows.probe(choice.method, everything, job.positive, choice.penalty)
    assert probe is not None
    fitted = [probes[fold] for fold in range(count)]
    control_scores = None if control is None else tasks
    return Headline(choices, held_out, calibrations, fitted, null, control_scores, final, probe, calibration)


def _no_scores(count: int, n: int) -> Scores:
    return Scores(np.zeros((count, n)), np.zeros((count, n)), np.zeros((count, n), dtype=bool))


def _figures(job: FitJob, scores: Scores, positive: np.ndarray) -> dict[str, float | None]:
    found = figures(scores.logits, scores.probabilities, scores.above, positive, job.folds.of)
    return {name: finite(value) for name, value in found.items()}


def quantiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """Quantiles of a null, 5%, 50% and 95%, without what is not finite; None of nothing."""
    there = [value for value in values if value is not None and np.isfinite(value)]
    if not there:
        return None
    low, median, high = np.quantile(there, [0.05, 0.5, 0.95])
    return {"low": float(low), "median": float(median), "high": float(high)}
