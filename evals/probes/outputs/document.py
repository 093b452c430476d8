"""What `probes.json` holds: the headline, the sweep's rows, their intervals and controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evals.auroc import Interval, band, by_folds, interval, resampled
from evals.probes.fitting.baselines import Baseline
from evals.probes.fitting.fitting import FitJob, Outcome
from evals.probes.fitting.headline import Headline, quantiles, summary
from evals.probes.inputs.data import Data
from evals.probes.sweep_options import Options

Record = dict[str, Any]


def document(
    given: Options,
    data: Data,
    job: FitJob,
    outcomes: Sequence[Outcome],
    headline: Headline,
    texts: Mapping[str, Baseline],
    lengths: Mapping[str, Baseline],
) -> Record:
    """Everything but the transfer. All intervals are of one bootstrap, so that differences are paired.

    Args:
        given: The options.
        data: The examples.
        job: Their folds.
        outcomes: Of every point, choice of tokens and method.
        headline: What the folds chose.
        texts: The text baseline of each choice of tokens.
        lengths: The length baseline of each.
    """
    text, length = (_as_chosen(job, headline, of) for of in (texts, lengths))
    series = [one.selected.held_out for one in outcomes]
    series += [headline.held_out.logits, *(scores for scores in (text,) if scores is not None)]
    samples = resampled(np.stack(series), data.positive, job.folds.of, data.groups, given.resamples, given.seed)
    rows, reasons = _rows(data, job, outcomes, samples, texts)
    own = summary(job, headline, data.group_count)
    own |= {"n": len(data.positive), "positives": int(data.positive.sum())}
    own |= {"groups": data.group_count, "folds": job.folds.count}
    own |= _bounded(own, "auroc", interval(own["auroc"], samples[len(rows)], data.group_count))
    own["length_auroc"] = None if length is None else float(by_folds(length, data.positive, job.folds.of))
    own |= _against_text(own, text, texts, samples[len(rows) :], job, data.group_count)
    own["faults"] = faults(own, rows)
    return {
        "headline": own,
        "rows": rows,
        "nulls": [_place(one) | {"control": quantiles(one.null.tolist())} for one in outcomes],
        "reasons": reasons,
        "session": data.examples.session,
        "model": data.examples.model,
        "revision": data.examples.revision,
        "positive": data.label,
        "group": given.group_column,
        "points": data.examples.points,
        "tokens": list(texts),
        "methods": list(job.methods),
        "c": sorted(set(given.c)),
        **{name: getattr(given, name) for name in ("label", "permutations", "resamples", "seed")},
        "left_out": data.examples.left_out,
        "lengths": {name: one.auroc for name, one in lengths.items()},
    }


def faults(own: Record, rows: Sequence[Record]) -> list[str]:
    """Intervals wholly below 0.5, in words.

    Args:
        own: The headline.
        rows: The sweep.
    """
    below = [row for row in rows if row["auroc_high"] is not None and row["auroc_high"] < 0.5]
    found = [
        f"the interval of the {name}'s AUROC ends at {own[key]:.3f}"
        for name, key in {"headline": "auroc_high", "text": "text_auroc_high"}.items()
        if own[key] is not None and own[key] < 0.5
    ]
    if below:
        found.append(f"the bands of {len(below)} of {len(rows)} rows end below 0.5 (first: {below[0]['point']})")
    if not found:
        return []
    return [
        f"Fault of the design: {' and '.join(found)}. Held-out groups are ranked the wrong way round: what goes with "
        "one class in the training groups goes with the other class in the held-out ones, as a word does that is true "
        "in one group and false in all others. Balance the examples: every ending as often true as false in its group. "
        "Until then a comparison with the text says little."
    ]


def _rows(
    data: Data, job: FitJob, outcomes: Sequence[Outcome], samples: np.ndarray, texts: Mapping[str, Baseline]
) -> tuple[list[Record], dict[str, str]]:
    """The sweep, and why what is null in it is null."""
    estimates = np.array([by_folds(one.selected.held_out, data.positive, job.folds.of) for one in outcomes])
    bands = band(estimates, samples[: len(outcomes)], data.group_count)
    rows, reasons = list[Record](), bands[0].reasons("auroc")
    for one, estimate, between in zip(outcomes, estimates.tolist(), bands, strict=True):
        null, text = quantiles(one.null.tolist()), texts[one.tokens]
        figures = {"auroc": estimate, "auroc_low": between.low, "auroc_high": between.high}
        figures |= {"control_auroc": null["median"] if null else None, "text_auroc": text.auroc}
        rows.append(_place(one) | figures | {"n": len(data.positive), "groups": data.group_count})
        reasons |= {"text_auroc": text.reason} if text.reason else {}
    return rows, reasons | ({} if len(job.permuted) else {"control_auroc": "no permutations"})


def _place(one: Outcome) -> Record:
    return {"point": one.point, "tokens": one.tokens, "method": one.method}


def _bounded(own: Record, name: str, between: Interval) -> Record:
    """An interval as two fields; the reasons of the headline say why there is none."""
    own["reasons"] |= between.reasons(name)
    return {f"{name}_low": between.low, f"{name}_high": between.high}


def _as_chosen(job: FitJob, headline: Headline, of: Mapping[str, Baseline]) -> np.ndarray | None:
    """A baseline's held-out scores, in each fold those for the tokens that the fold chose."""
    found = np.zeros(len(job.positive))
    for fold, choice in enumerate(headline.choices):
        scores = of[choice.tokens].held_out
        if scores is None:
            return None
        found[job.folds.of == fold] = scores[job.folds.of == fold]
    return found


def _against_text(
    own: Record, text: np.ndarray | None, texts: Mapping[str, Baseline], samples: np.ndarray, job: FitJob, groups: int
) -> Record:
    """The text's AUROC beside the headline's; `samples` are the headline's and the text's, `[2, b]`."""
    if text is None:
        names = ["text_auroc", "text_difference", "beats_text"]
        names += [f"{name}_{end}" for name in names[:2] for end in ("low", "high")]
        own["reasons"] |= dict.fromkeys(names, next(one.reason for one in texts.values() if one.reason))
        return dict.fromkeys(names)
    area = float(by_folds(text, job.positive, job.folds.of))
    difference = own["auroc"] - area
    between = interval(difference, samples[0] - samples[1], groups, exact=False)
    found: Record = {"text_auroc": area} | _bounded(own, "text_auroc", interval(area, samples[1], groups))
    found |= {"text_difference": difference} | _bounded(own, "text_difference", between)
    found["beats_text"] = None if between.low is None else between.low > 0
    if between.reason:
        own["reasons"]["beats_text"] = between.reason
    return found
