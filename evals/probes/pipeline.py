"""The whole way: examples, folds, probes of every point, the headline, intervals, and what is written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from deployments.options import home
from evals.config import EvalError
from evals.probes import baselines, labels, outputs, report
from evals.probes.baselines import Baseline
from evals.probes.examples import Examples, find
from evals.probes.fitting import Job, Outcome, Rows, probability, probe_point
from evals.probes.folds import by_type, permuted, split
from evals.probes.headline import Headline, auroc_of, choose, null_of, selectivity, summary
from evals.probes.metrics import Interval, auroc, band, by_folds, interval, resampled
from evals.probes.options import Options

_SMALL = 1 << 23  # bytes of a point's rows up to which points are probed side by side, each by one thread


class Result(NamedTuple):
    """What a sweep found and writes.

    Attributes:
        document: `probes.json`: the headline and the rows among it.
        scores: Each example's held-out probability, as `scores.parquet` has it.
        tensors: The probe file's tensors.
        out: The directory; None where nothing was written.
    """

    document: dict[str, Any]
    scores: pa.Table
    tensors: dict[str, torch.Tensor]
    out: Path | None

    @property
    def headline(self) -> dict[str, Any]:
        """The figures of the procedure that chooses layer, tokens, method and C inside the folds."""
        found: dict[str, Any] = self.document["headline"]
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The sweep: a row for each point, choice of tokens and method."""
        found: list[dict[str, Any]] = self.document["rows"]
        return found


class _Data(NamedTuple):
    """Examples with their classes and groups, `[n]` each."""

    examples: Examples
    label: str
    positive: np.ndarray
    groups: np.ndarray

    @property
    def group_count(self) -> int:
        return len(np.unique(self.groups))


def sweep(**options: Any) -> Result:
    """Fit probes, and write what they found where `out` names a directory.

    Args:
        **options: The fields of `evals.probes.Options`.

    Raises:
        EvalError: An option, or the stored runs, do not allow it; the message has counts.
        OSError: The disk refuses.
    """
    started = time.monotonic()
    given = Options(**options)
    data = _load(given)
    folds = split(data.positive, data.groups, given.folds, given.seed, given.group_column is not None)
    shuffled = permuted(data.positive, data.groups, given.permutations, given.seed)
    penalties = 1 / np.array(sorted(set(given.c)))
    ranges = data.examples.ranges
    job = Job(data.examples.index, ranges, data.positive, folds, shuffled, tuple(given.methods), penalties)
    tasks = _control_task(given, data)
    with _threads(job):
        outcomes = _probe(job, data.examples.points, given.ray)
        headline = choose(job, outcomes, tasks)
        texts = {name: baselines.text(job, data.examples.runs, name) for name in ranges}
        lengths = {name: baselines.length(job, data.examples.runs, name) for name in ranges}
    document = _document(given, data, job, outcomes, headline, texts, lengths)
    document["headline"]["selectivity"] = None if tasks is None else selectivity(job, headline, tasks)
    if tasks is None:
        document["headline"]["reasons"]["selectivity"] = "a control task is for --ungrouped examples, with permutations"
    document["transfer"] = [_transfer(given, data, headline, session) for session in given.test_sessions]
    document["seconds"] = round(time.monotonic() - started, 3)
    scores = outputs.scores(data.examples, data.groups, data.positive, folds.of, headline)
    tensors = outputs.tensors(headline)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        outputs.write(given.out, document, scores, tensors, outputs.metadata(given.probe_name, document))
        report.write(given.out, document, data.examples, job, headline, scores)
    return Result(document, scores, tensors, given.out)


def _load(given: Options, session: str | None = None, like: tuple[str, str, str] | None = None) -> _Data:
    """The examples of the session that is asked for, or of another one at the point and tokens of `like`."""
    spans = [choice.label for choice in given.choices if choice.kind == "span"]
    group = given.group_column
    if given.results is not None:
        name, source = labels.from_results(given.results, given.label, group, spans)
    else:
        name = session or given.session or ""
        file = given.labels
        source = labels.from_file(file, given.label, group, spans) if file else labels.from_tags(given.label, group)
    store = given.store if given.store is not None else home() / "activations"
    points, choices = given.points, given.choices
    if like is not None:
        points, choices = [like[0]], [choice for choice in choices if choice.name == like[1]]
    found = find(store, name, source, points, choices, group is not None, given.skip_missing)
    label, positive = labels.classes([run.label for run in found.runs], like[2] if like else given.positive)
    _, groups = np.unique([run.group for run in found.runs], return_inverse=True)
    return _Data(found, label, positive, groups)


def _probe(job: Job, points: Sequence[str], ray: str | None) -> list[Outcome]:
    """Every point's outcomes, in order."""
    if ray is not None:
        from evals.probes.by_ray import probe_points

        found = probe_points(job, points, ray)
    else:
        found = _probe_here(job, points)
    shown = tqdm(found, total=len(points), desc="points", unit="point", disable=None)
    return [outcome for outcomes in shown for outcome in outcomes]


def _probe_here(job: Job, points: Sequence[str]) -> Iterator[list[Outcome]]:
    """Small points side by side, large ones one at a time."""
    if not _small(job):
        for point in points:
            yield probe_point(job, point)
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(lambda point: probe_point(job, point), points)


def _small(job: Job) -> bool:
    """Whether a point's matrices are too small for several threads."""
    return len(job.positive) * max(column.width for column in job.index.columns.values()) < _SMALL


@contextmanager
def _threads(job: Job) -> Iterator[None]:
    """One thread of torch for small points, which several make slower."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if _small(job) else threads)
        yield
    finally:
        torch.set_num_threads(threads)


def _control_task(given: Options, data: _Data) -> np.ndarray | None:
    """Labelings of Hewitt and Liang's control task by the last token of each example; None with groups."""
    if given.group_column is not None or not given.permutations:
        return None
    tokens = given.choices[0].name
    types = np.array([run.at[tokens].token_id for run in data.examples.runs])
    return by_type(types, data.positive, given.permutations, given.seed)


def _document(
    given: Options,
    data: _Data,
    job: Job,
    outcomes: Sequence[Outcome],
    headline: Headline,
    texts: dict[str, Baseline],
    lengths: dict[str, Baseline],
) -> dict[str, Any]:
    """All but the transfer, with intervals from one bootstrap, so that their differences are paired."""
    text, length = (_as_chosen(job, headline, of) for of in (texts, lengths))
    series = [one.selected.held_out for one in outcomes] + [headline.held_out.logits, length]
    series += [] if text is None else [text]
    samples = resampled(np.stack(series), data.positive, job.folds.of, data.groups, given.resamples, given.seed)
    groups, many = data.group_count, len(outcomes)
    estimates = np.array([auroc_of(one, job) for one in outcomes])
    bands = band(estimates, samples[:many], groups)
    rows = [
        _row(one, float(estimate), between, texts[one.tokens], len(data.positive), groups)
        for one, estimate, between in zip(outcomes, estimates, bands, strict=True)
    ]
    own = summary(job, headline, groups)
    own |= _bounds("auroc", interval(own["auroc"], samples[many], groups), own["reasons"])
    own["length_auroc"] = float(by_folds(length, data.positive, job.folds.of))
    own |= _against_text(text, texts, own, samples[many:], data.positive, job.folds.of, groups)
    own |= {"n": len(data.positive), "positives": int(data.positive.sum()), "groups": groups, "folds": job.folds.count}
    own["faults"] = _faults(own)
    return {
        "headline": own,
        "rows": rows,
        "session": data.examples.session,
        "model": data.examples.model,
        "label": given.label,
        "positive": data.label,
        "group": given.group_column,
        "points": data.examples.points,
        "tokens": [choice.name for choice in given.choices],
        "methods": list(given.methods),
        "c": sorted(set(given.c)),
        "permutations": given.permutations,
        "resamples": given.resamples,
        "seed": given.seed,
        "left_out": data.examples.left_out,
        "lengths": {name: one.auroc for name, one in lengths.items()},
        "intervals": "over groups, conditional on the fitted probes; those of rows hold for all rows at once",
    }


def _row(outcome: Outcome, estimate: float, between: Interval, text: Baseline, n: int, groups: int) -> dict[str, Any]:
    reasons = dict[str, str]()
    row = {"point": outcome.point, "tokens": outcome.tokens, "method": outcome.method, "auroc": estimate}
    row |= _bounds("auroc", between, reasons)
    null = null_of(outcome)
    for name, quantile in {"control_auroc": "median", "control_low": "low", "control_high": "high"}.items():
        row[name] = null[quantile] if null else None
    if null is None:
        reasons["control_auroc"] = "no permutations"
    row |= {"text_auroc": text.auroc, "n": n, "groups": groups}
    if text.reason:
        reasons["text_auroc"] = text.reason
    return row | {"reasons": reasons}


def _bounds(name: str, between: Interval, reasons: dict[str, str]) -> dict[str, float | None]:
    if between.reason:
        reasons |= {f"{name}_low": between.reason, f"{name}_high": between.reason}
    return {f"{name}_low": between.low, f"{name}_high": between.high}


def _as_chosen(job: Job, headline: Headline, of: dict[str, Baseline]) -> np.ndarray | None:
    """A baseline's scores, in each fold those for the tokens that the fold chose."""
    found = np.zeros(len(job.positive))
    for fold, choice in enumerate(headline.choices):
        scores = of[choice.tokens].held_out
        if scores is None:
            return None
        found[job.folds.of == fold] = scores[job.folds.of == fold]
    return found


def _against_text(
    text: np.ndarray | None,
    texts: dict[str, Baseline],
    own: dict[str, Any],
    samples: np.ndarray,
    positive: np.ndarray,
    folds: np.ndarray,
    groups: int,
) -> dict[str, Any]:
    """The text's AUROC beside the headline's; samples are the headline's, the length's and the text's, `[3, b]`."""
    names = ("text_auroc", "text_difference", "text_difference_low", "text_difference_high", "beats_text")
    if text is None:
        reason = next(one.reason for one in texts.values() if one.reason)
        own["reasons"] |= dict.fromkeys(names, reason)
        return dict.fromkeys(names)
    area = float(by_folds(text, positive, folds))
    found: dict[str, Any] = {"text_auroc": area, "text_difference": own["auroc"] - area}
    difference = samples[0] - samples[2]
    # an AUROC of 1 has samples without spread; the text's are then all there is
    between = interval(0.5, difference, groups)
    found |= _bounds("text_difference", between, own["reasons"])
    found["beats_text"] = None if between.low is None else between.low > 0
    if between.reason:
        own["reasons"]["beats_text"] = between.reason
    return found


def _faults(own: dict[str, Any]) -> list[str]:
    high = own["auroc_high"]
    if high is None or high >= 0.5:
        return []
    return [
        f"The interval of the AUROC ends at {high:.3f}, below 0.5: held-out groups are ranked the wrong way round. "
        "That is a fault of the design: what goes with one class in the training groups goes with the other in the "
        "held-out ones, as a word that is true in one group and false in all others. Use every ending equally often in "
        "true and in false examples of its group."
    ]


def _transfer(given: Options, data: _Data, headline: Headline, session: str) -> dict[str, Any]:
    """The probe of all examples on another session's."""
    final = headline.final
    test = _load(given, session, (final.point, final.tokens, data.label))
    if test.examples.model != data.examples.model:
        raise EvalError(
            f"--test-session {session}: its runs are of {test.examples.model}, the probe is of {data.examples.model}"
        )
    rows = Rows(test.examples.index, final.point, final.tokens, test.examples.ranges[final.tokens])
    scores, positive = rows.scores(headline.probe), test.positive
    area, likely = float(auroc(scores, positive)[0]), probability(scores, headline.calibration) > 0.5
    one = np.zeros(len(positive), dtype=np.int64)
    samples = resampled(scores[None], positive, one, test.groups, given.resamples, given.seed)
    reasons = dict[str, str]()
    found = {"session": session, "point": final.point, "tokens": final.tokens, "method": final.method, "auroc": area}
    found |= _bounds("auroc", interval(area, samples[0], test.group_count), reasons)
    labelings = permuted(positive, test.groups, given.permutations, given.seed)
    null = [float(auroc(scores, labels)[0]) for labels in labelings]
    found["control_auroc"] = float(np.median(null)) if null else None
    if not null:
        reasons["control_auroc"] = "no permutations"
    rates = [float(np.mean(likely[positive])), float(np.mean(~likely[~positive]))]
    found |= {"balanced_accuracy": sum(rates) / 2, "n": len(positive), "groups": test.group_count}
    return found | {"left_out": test.examples.left_out, "reasons": reasons}
