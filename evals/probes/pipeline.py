"""A whole sweep: examples, folds, probes of every point, the headline, intervals, and the files."""

from __future__ import annotations

import os
import sys
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

from evals.probes.fitting import baselines
from evals.probes.fitting.fitting import FitJob, Outcome, probe_point
from evals.probes.fitting.folds import permuted, split
from evals.probes.fitting.headline import choose
from evals.probes.fitting.selectivity import control_task, selectivity
from evals.probes.fitting.transfer import transferred
from evals.probes.inputs.data import load
from evals.probes.outputs import report_page, sweep_files
from evals.probes.outputs.document import document
from evals.probes.sweep_options import Options

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
    data, tests = load(given)
    folds = split(data.positive, data.groups, given.folds, given.seed, given.group_column is not None)
    shuffled = permuted(data.positive, data.groups, data.names, given.permutations, given.seed)
    penalties, ranges = 1 / np.array(sorted(set(given.c))), data.examples.ranges
    job = FitJob(data.examples.index, ranges, data.positive, folds, shuffled, tuple(given.methods), penalties)
    task = control_task(given, data)
    with _threads(job):
        outcomes = _probe(job, data.examples.points, given.ray)
        headline = choose(job, outcomes, task.labels)
        texts = {name: baselines.text(job, data.examples.runs, name) for name in ranges}
        lengths = {name: baselines.length(job, data.examples.runs, name) for name in ranges}
    found = document(given, data, job, outcomes, headline, texts, lengths)
    found["headline"] |= selectivity(job, headline, task, found["headline"]["reasons"])
    found["transfer"] = [transferred(given, data, headline, test) for test in tests]
    found["seconds"] = round(time.monotonic() - started, 3)
    scores = sweep_files.scores(data.examples, data.positive, folds.of, headline)
    tensors = sweep_files.tensors(headline)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        sweep_files.write(given.out, found, scores, tensors, sweep_files.metadata(given.probe_name, found))
        report_page.write(given.out, found, data.examples, job, headline)
    return Result(found, scores, tensors, given.out)


def _probe(job: FitJob, points: Sequence[str], ray: str | None) -> list[Outcome]:
    """Every point's outcomes, in order."""
    if ray is not None:
        from evals.probes.fitting.by_ray import probe_points

        found = probe_points(job, points, ray)
    else:
        found = _probe_here(job, points)
    shown = tqdm(found, total=len(points), desc="points", unit="point", mininterval=0.1 if sys.stderr.isatty() else 10)
    return [outcome for outcomes in shown for outcome in outcomes]


def _probe_here(job: FitJob, points: Sequence[str]) -> Iterator[list[Outcome]]:
    """Small points side by side, large ones one at a time."""
    if not _small(job):
        yield from (probe_point(job, point) for point in points)
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(lambda point: probe_point(job, point), points)


def _small(job: FitJob) -> bool:
    """Whether a point's matrices are too small for several threads."""
    return len(job.positive) * max(column.width for column in job.index.columns.values()) < _SMALL


@contextmanager
def _threads(job: FitJob) -> Iterator[None]:
    """One thread of torch for small points, which several make slower."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if _small(job) else threads)
        yield
    finally:
        torch.set_num_threads(threads)
