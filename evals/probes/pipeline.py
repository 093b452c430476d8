"""A whole sweep: examples, folds, probes of every point, the headline, intervals, and the files."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from evals.probes import baselines, report_page
from evals.probes.document import document
from evals.probes.examples import load
from evals.probes.fits import METHODS, FitJob, Method, Outcome, probe_point
from evals.probes.folds import permuted, split
from evals.probes.headline import Headline, choose, selectivity, transferred
from evals.probes.sweep_options import Options
from evals.results.results import write_json

_SMALL = 1 << 26  # bytes of a point's rows up to which points are probed side by side, each by one thread


class Result(NamedTuple):
    """What a sweep found and writes."""

    document: dict[str, Any]  # `probes.json`: the headline, the rows and the scores among it
    tensors: dict[str, torch.Tensor]  # the probe file's tensors
    out: Path | None  # the directory; None where nothing was written

    @property
    def headline(self) -> dict[str, Any]:
        """The figures of the procedure that chooses layer, tokens, method and C inside the folds."""
        figures: dict[str, Any] = self.document["headline"]
        return figures

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The sweep: a row for each point, choice of tokens and method."""
        figures: list[dict[str, Any]] = self.document["rows"]
        return figures


def sweep(
    *,
    session: str | None = None,
    results: Path | None = None,
    inspect: Path | None = None,
    store: Path | None = None,
    labels: Path | None = None,
    label: str = "label",
    positive: str | None = None,
    group: str | None = None,
    ungrouped: bool = False,
    skip_missing: bool = False,
    test_sessions: Sequence[str] = (),
    points: Sequence[str] = ("layers.*.output",),
    tokens: Sequence[str] = ("prompt_last",),
    methods: Sequence[Method] = METHODS,
    c: Sequence[float] = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0),
    folds: int = 5,
    permutations: int = 20,
    seed: int = 0,
    out: Path | None = None,
    name: str | None = None,
    install: str | None = None,
) -> Result:
    """Fit probes, and write what they found where `out` names a directory; the arguments are `evals.probes.Options`.

    Raises:
        EvalError: An option, or the stored runs, do not allow it; the message has counts.
        OSError: The disk refuses.
    """
    given = Options(**locals())
    started = time.monotonic()
    data, tests = load(given)
    grouped = given.group_column is not None or data.group_count < len(data.runs)
    parts = split(data.positive, data.groups, given.folds, given.seed, grouped)
    shuffled = permuted(data.positive, data.groups, data.names, given.permutations, given.seed)
    cs = tuple(sorted(set(given.c)))
    job = FitJob(data.index, data.ranges, data.positive, parts, shuffled, tuple(given.methods), cs)
    outcomes = _probe(job, data.points)
    headline = choose(job, outcomes)
    texts, lengths = (
        {name: of(job, data.runs, name) for name in data.ranges} for of in (baselines.text, baselines.length)
    )
    contents = document(given, data, job, outcomes, headline, texts, lengths)
    if given.group_column is None:
        types = np.array([run.at[given.choices[0].name].token_id for run in data.runs])
        task = selectivity(job, headline, types, given.seed)
        contents["headline"]["reasons"] |= task.pop("reasons", {})
        contents["headline"] |= task
    contents["transfer"] = [transferred(given, data, headline, test) for test in tests]
    contents["seconds"] = round(time.monotonic() - started, 3)
    tensors = _tensors(headline)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        write_json(given.out / "probes.json", contents)
        save_file(tensors, part := given.out / f"{given.probe_name}.safetensors.part", _metadata(given, contents))
        part.replace(part.with_suffix(""))
        report_page.write(given.out, contents, data)
    return Result(contents, tensors, given.out)


def _probe(job: FitJob, points: Sequence[str]) -> list[Outcome]:
    """Every point's outcomes, in order: small points side by side, large ones one at a time, which need the memory."""
    small = len(job.positive) * max(column.width for column in job.index.columns.values()) <= _SMALL
    workers = len(os.sched_getaffinity(0)) if small else 1
    with threadpool_limits(1 if small else None), ThreadPoolExecutor(workers) as pool:
        results = pool.map(lambda point: probe_point(job, point), points)
        interval = 0.1 if sys.stderr.isatty() else 10
        shown = tqdm(results, total=len(points), desc="points", unit="point", mininterval=interval)
        return [outcome for outcomes in shown for outcome in outcomes]


def _tensors(headline: Headline) -> dict[str, torch.Tensor]:
    """The probe file's tensors: `weight [1, hidden]`, `bias [1]`, `mean`, `std [hidden]`, `slope`, `offset [1]`."""
    probe, (slope, offset) = headline.probe, headline.calibration
    numbers = {"weight": probe.weight[None], "bias": [probe.bias], "mean": probe.mean, "std": probe.std}
    return {
        name: torch.from_numpy(np.array(value, dtype=np.float32))
        for name, value in (numbers | {"slope": [slope], "offset": [offset]}).items()
    }


def _metadata(given: Options, document: dict[str, Any]) -> dict[str, str]:
    """The probe file's metadata."""
    headline = document["headline"]
    return {
        "name": given.probe_name,
        "model": document["model"],
        "point": headline["point"],
        "kind": "linear",
        "activation": "sigmoid",
        "labels": json.dumps([str(document["positive"])]),
        "tokens": headline["tokens"],
        "method": headline["method"],
        "description": (
            f"{document['label']} = {document['positive']} of session {document['session']}: AUROC "
            f"{headline['auroc']:.3f} in nested cross-validation, {headline['n']} examples in "
            f"{headline['groups']} groups"
        ),
    }
