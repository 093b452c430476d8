"""What `probes.json` holds: the headline, the sweep's rows, each example's score, intervals and controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evals.auroc import Area, area, band, interval
from evals.labels.table import as_number
from evals.probes.baselines import Baseline
from evals.probes.examples import Examples
from evals.probes.fits import FitJob, Outcome
from evals.probes.headline import Headline, control, summary
from evals.probes.sweep_options import Options

Record = dict[str, Any]


def document(
    given: Options,
    data: Examples,
    job: FitJob,
    outcomes: Sequence[Outcome],
    headline: Headline,
    texts: Mapping[str, Baseline],
    lengths: Mapping[str, Baseline],
) -> Record:
    """Everything but selectivity and transfer.

    Args:
        given: The options.
        data: The examples.
        job: Their folds.
        outcomes: Of every point, choice of tokens and method.
        headline: What the folds chose.
        texts: The text baseline of each choice of tokens.
        lengths: The length baseline of each.
    """

    def compared(scores: np.ndarray | None) -> Area | None:
        return None if scores is None else area(scores, data.positive, data.groups, job.folds)

    rows = _rows(
        outcomes, [area(outcome.selected.held_out, data.positive, data.groups, job.folds) for outcome in outcomes]
    )
    by_text, by_length = (
        {name: compared(baseline.held_out) for name, baseline in of.items()} for of in (texts, lengths)
    )
    for row in rows:
        row["text_auroc"], row["length_auroc"] = (_value(of[row["tokens"]]) for of in (by_text, by_length))
    own = summary(job, headline)
    own |= {"n": len(data.positive), "positives": int(data.positive.sum()), "groups": data.group_count}
    own["folds"] = given.folds
    reached = area(headline.scores, data.positive, data.groups, job.folds)
    text, length = (compared(_as_chosen(job, headline, of)) for of in (texts, lengths))
    difference = None if text is None else reached.less(text)
    why_no_text = next((baseline.reason for baseline in texts.values() if baseline.reason), None)
    for name, of in (("auroc", reached), ("text_auroc", text), ("text_difference", difference)):
        _add(own, name, of, why_no_text)
    own["length_auroc"] = _value(length)
    if (least_difference := own["text_difference_low"]) is None:
        own["reasons"]["beats_text"] = own["reasons"].get("text_difference") or own["reasons"]["text_difference_low"]
    own["beats_text"] = None if least_difference is None else least_difference > 0
    own["faults"] = faults(own, rows)
    return {
        "headline": own,
        "rows": rows,
        "session": data.session,
        "model": data.model,
        "revision": data.revision,
        "positive": _plain(data.label),
        "group": given.group_column,
        "points": data.points,
        "tokens": list(texts),
        "methods": list(job.methods),
        "c": list(job.c),
        **{name: getattr(given, name) for name in ("label", "permutations", "seed")},
        "left_out": data.left_out,
        "scores": _scores(data, job, headline),
    }


def faults(own: Record, rows: Sequence[Record]) -> list[str]:
    """Intervals wholly below 0.5, in words.

    Args:
        own: The headline.
        rows: The sweep.
    """
    below = [row for row in rows if row["auroc_high"] is not None and row["auroc_high"] < 0.5]
    causes = [
        f"the interval of the {name}'s AUROC ends at {own[key]:.3f}"
        for name, key in {"headline": "auroc_high", "text": "text_auroc_high"}.items()
        if own[key] is not None and own[key] < 0.5
    ]
    if below:
        causes.append(f"the bands of {len(below)} of {len(rows)} rows end below 0.5 (first: {below[0]['point']})")
    if not causes:
        return []
    return [
        f"Fault of the design: {' and '.join(causes)}. Held-out groups are ranked the wrong way round: what goes with "
        "one class in the training groups goes with the other class in the held-out ones, as a word does that is true "
        "in one group and false in all others. Balance the examples: every ending as often true as false in its group. "
        "Until then a comparison with the text says little."
    ]


def _rows(outcomes: Sequence[Outcome], areas: Sequence[Area]) -> list[Record]:
    return [
        {"point": outcome.point, "tokens": outcome.tokens, "method": outcome.method}
        | {"auroc": of.value, "auroc_low": between.low, "auroc_high": between.high}
        | control(outcome.null.mean(axis=0))
        for outcome, of, between in zip(outcomes, areas, band(areas), strict=True)
    ]


def _scores(data: Examples, job: FitJob, headline: Headline) -> list[Record]:
    """A record for each example, with its probability by the probe of its fold, which was not trained on it."""
    names = "run_id", "sample_id", "group", "label", "fold", "score", "probability"
    runs = [(run.run_id, run.sample_id, run.group, _plain(run.label)) for run in data.runs]
    scores = zip(job.folds.tolist(), headline.scores.tolist(), headline.probabilities.tolist(), strict=True)
    return [dict(zip(names, run + score, strict=True)) for run, score in zip(runs, scores, strict=True)]


def _plain(label: str) -> str | int | float:
    """A label that is a number as one."""
    value = as_number(label)
    return label if value is None else value


def _value(of: Area | None) -> float | None:
    return None if of is None else of.value


def _add(own: Record, name: str, of: Area | None, reason: str | None) -> None:
    """A figure and the bounds of its interval; the reasons of the headline explain what is null."""
    between = None if of is None else interval(of, is_difference=name.endswith("difference"))
    own |= {name: _value(of)}
    own |= {f"{name}_low": between and between.low, f"{name}_high": between and between.high}
    if between is None or between.reason:
        own["reasons"][f"{name}_low" if between else name] = between.reason if between else reason


def _as_chosen(job: FitJob, headline: Headline, of: Mapping[str, Baseline]) -> np.ndarray | None:
    """A baseline's held-out scores, in each fold those for the tokens that the fold chose."""
    held_out = np.zeros(len(job.positive))
    for fold, choice in enumerate(headline.choices):
        if (scores := of[choice.tokens].held_out) is None:
            return None
        held_out[job.folds == fold] = scores[job.folds == fold]
    return held_out
