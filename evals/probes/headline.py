"""The headline: what chooses point, tokens, method and C inside the folds, its final probe, and that one elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.metrics import balanced_accuracy_score, brier_score_loss

from evals.auroc import area, interval
from evals.probes.examples import Examples
from evals.probes.features import features
from evals.probes.fits import FitJob, Method, Outcome, Probe, Standardized, aurocs, probability
from evals.probes.folds import permuted
from evals.probes.sweep_options import Options

TYPES = 20  # of last tokens; of fewer there are too few labelings for a control task


class ProbeChoice(NamedTuple):
    """One probe's settings; the difference of means has no C."""

    point: str
    tokens: str
    method: Method
    c: float | None


class Headline(NamedTuple):
    """What the folds chose, and the probe that is fitted to all examples."""

    choices: list[ProbeChoice]  # each outer fold's
    scores: np.ndarray  # each example's, by its fold's choice, which was not trained on it, `[n]`
    probabilities: np.ndarray  # the same, calibrated in the training folds, `[n]`
    null: np.ndarray  # the AUROC of each permuted labeling, `[p]`
    final: ProbeChoice  # the settings of the probe of all examples
    probe: Probe  # that probe
    calibration: tuple[float, float]  # its slope and offset, from scores to log odds


def choose(job: FitJob, outcomes: Sequence[Outcome]) -> Headline:
    """Choose in the inner folds, score in the outer ones, and fit the probe of all examples.

    Args:
        job: The job.
        outcomes: Of every point, choice of tokens and method; the first of equally good ones is chosen.
    """
    count = int(job.folds.max()) + 1
    winners = [max(outcomes, key=lambda outcome: float(outcome.selected.inner[fold])) for fold in range(count)]
    scores, probabilities = np.empty((2, len(job.positive)))
    for fold, outcome in enumerate(winners):
        rows = job.folds == fold
        scores[rows], probabilities[rows] = outcome.selected.held_out[rows], outcome.selected.probabilities[rows]
    best = max(outcomes, key=lambda outcome: outcome.selected.score)
    final = _choice(job, best, best.selected.best)
    rows = features(job.index, final.point, job.ranges[final.tokens])
    return Headline(
        choices=[_choice(job, outcome, int(outcome.selected.chosen[fold])) for fold, outcome in enumerate(winners)],
        scores=scores,
        probabilities=probabilities,
        null=np.mean([outcome.null[fold] for fold, outcome in enumerate(winners)], axis=0),
        final=final,
        probe=Standardized(rows, np.ones(len(rows), dtype=bool)).probe(final.method, job.positive, final.c or 1.0),
        calibration=best.selected.calibration,
    )


def _choice(job: FitJob, outcome: Outcome, column: int) -> ProbeChoice:
    c = None if outcome.method == "difference" else float(job.settings(outcome.method)[column])
    return ProbeChoice(outcome.point, outcome.tokens, outcome.method, c)


def summary(job: FitJob, headline: Headline) -> dict[str, Any]:
    """Figures for JSON, without intervals and baselines; `reasons` explains what is null."""
    reasons = {} if len(job.permuted) else {"control_auroc": "no permutations"}
    if headline.final.c is None:
        reasons["c"] = "the difference of means has no C"
    return (
        headline.final._asdict()
        | {
            "balanced_accuracy": float(balanced_accuracy_score(job.positive, headline.probabilities > 0.5)),
            "brier": float(brier_score_loss(job.positive, headline.probabilities)),
            "chosen": [{"fold": fold} | choice._asdict() for fold, choice in enumerate(headline.choices)],
            "reasons": reasons,
        }
        | control(headline.null)
    )


def control(null: np.ndarray) -> dict[str, float | None]:
    """The 5%, 50% and 95% quantiles of a null `[p]`, all None without one."""
    names = "control_low", "control_auroc", "control_high"
    return dict(zip(names, np.quantile(null, [0.05, 0.5, 0.95]).tolist() if len(null) else [None] * 3, strict=True))


def selectivity(job: FitJob, headline: Headline, types: np.ndarray, seed: int) -> dict[str, Any]:
    """Accuracy, less that at a control task, in which each type of last token has a random label.

    Args:
        job: The job.
        headline: The choices, which are fitted to the control task as well.
        types: Each example's last token, `[n]`.
        seed: Of the labels.

    Returns:
        `selectivity` and `control_accuracy` (a median), and `reasons` if they are null.
    """
    distinct, of = np.unique(types, return_inverse=True)
    reason = None if len(job.permuted) else "no permutations"
    if len(distinct) < TYPES:
        reason = f"the examples end in {len(distinct)} types of tokens; a control task needs {TYPES}"
    if reason:
        return {"selectivity": None, "control_accuracy": None, "reasons": {"selectivity": reason}}
    draws = np.random.default_rng(seed).random((len(job.permuted), len(distinct)))
    labels = (draws < job.positive.mean())[:, of].T  # [n, p]
    right = np.empty(labels.shape, dtype=bool)
    for fold, choice in enumerate(headline.choices):
        rows, held_out = features(job.index, choice.point, job.ranges[choice.tokens]), job.folds == fold
        space, c = Standardized(rows, ~held_out), np.full(labels.shape[1], choice.c or 1.0)
        right[held_out] = (space.scores(choice.method, labels, c)[held_out] > 0) == labels[held_out]
    accuracy = float(np.mean((headline.scores > 0) == job.positive))
    baseline = float(np.median(right.mean(axis=0)))
    return {"selectivity": accuracy - baseline, "control_accuracy": baseline}


def transferred(given: Options, data: Examples, headline: Headline, test: Examples) -> dict[str, Any]:
    """Figures of the probe of all examples on those of a test session, for JSON.

    The null is that of the session's labels permuted, scored by the same probe.

    Args:
        given: The options.
        data: The examples that the probe was fitted to.
        headline: With that probe.
        test: The test session's examples.

    Raises:
        EvalError: Rows are not finite.
        OSError: The disk refuses.
    """
    final, positive = headline.final, test.positive
    scores = headline.probe.scores(features(test.index, final.point, test.ranges[final.tokens]))
    own = area(scores, positive, test.groups)
    between = interval(own)
    labelings = permuted(positive, test.groups, test.names, given.permutations, given.seed).T
    return {
        "session": test.session,
        "auroc": own.value,
        "auroc_low": between.low,
        "auroc_high": between.high,
        **control(aurocs(np.broadcast_to(scores[:, None], labelings.shape), labelings)),
        "balanced_accuracy": float(balanced_accuracy_score(positive, probability(scores, headline.calibration) > 0.5)),
        "n": len(positive),
        "groups": test.group_count,
        "shared_groups": len({run.group for run in test.runs} & {run.group for run in data.runs}),
        "left_out": test.left_out,
        "reasons": {"auroc_low": between.reason} if between.reason else {},
    }
