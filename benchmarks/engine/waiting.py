"""Decode steps beside a busy process, by how OpenMP's threads wait: `python -m benchmarks.engine.waiting`.

Two engines take turns, each in a process of its own: one whose threads wait for each other as GNU OpenMP's do by
default, and one with this project's `GOMP_SPINCOUNT`. With 1, 8 and 32 requests at once, alone and beside a process
that keeps one core busy. Rates are generated tokens per second; the last table has milliseconds of a decode step.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import measured_models, report, settings
from benchmarks.common.children import ROOT, child
from benchmarks.common.findings import Findings
from benchmarks.common.measuring import Ratio, Run, Way
from benchmarks.ways import ours
from benchmarks.ways.peers import Work
from deployments.engine.engine import Engine
from deployments.interrupts import terminate_as_interrupt
from deployments.model.model import Model

# What a process imports first: OpenMP reads the variable when torch loads it, and `deployments` sets it.
FIRST = {"OpenMP's default": "torch", "GOMP_SPINCOUNT=3000": "deployments"}
CODE = "import os; os.environ.pop('GOMP_SPINCOUNT', None); import {}; from benchmarks.engine import waiting; "
ROWS, PROMPT = (1, 8, 32), 16  # requests, tokens


def steps(model: str, dtype: str, threads: int, new_tokens: int) -> None:
    """For each number of requests on stdin, write the mean seconds of their decode steps to stdout."""
    torch.set_num_threads(threads)
    built = measured_models.build(model, settings.DTYPES[dtype])
    engine = Engine(Model(built, measured_models.tokenizer(model), model))
    for line in sys.stdin:
        work = Work(torch.randint(3, 1000, (int(line), PROMPT)).tolist(), new_tokens)
        gaps = ours.gaps(engine, work, [0] * len(work.prompts))
        print(statistics.fmean(gap.seconds for gap in gaps), flush=True)


def _step(process: Any, rows: int) -> Run:
    print(rows, file=process.stdin, flush=True)
    return Run([], rows, float(process.stdout.readline()))


def measure(title: str, findings: Findings, *processes: Any) -> None:
    """Measure the steps of both processes, alone and beside a busy one, and show their milliseconds."""
    table, (default, project) = list[list[str]](), FIRST
    for company, program in (("alone", "pass"), ("beside a busy process", "while True: pass")):
        with child([sys.executable, "-c", program], dict(os.environ), Path(os.devnull)):
            for rows in ROWS:
                part = f"{rows} at once, {company}"
                ways = [Way(name, partial(_step, one, rows)) for name, one in zip(FIRST, processes, strict=True)]
                findings.compare(title, part, ways, [Ratio(project, default)], default, findings.options.rounds)
                rates = [way[findings.unit] for way in findings.cases[title][part]["ways"].values()]
                table.append([part, *(f"{1e3 * rows / rate:.1f}" for rate in rates)])
    print(report.table(f"{title}: a decode step, ms", ["requests", *FIRST], table), flush=True)


if __name__ == "__main__":
    terminate_as_interrupt()
    parser = settings.parser(__doc__, "benchmark-waiting")
    parser.set_defaults(new_tokens=20)
    options = parser.parse_args()
    findings = Findings(options)
    piped = partial(subprocess.Popen, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for model, dtype in itertools.product(options.model or ["random-40m"], settings.dtypes(options)):
        call = f"waiting.steps{model, dtype, options.threads, options.new_tokens}"
        commands = ([sys.executable, "-c", CODE.format(first) + call] for first in FIRST.values())
        with piped(next(commands)) as default, piped(next(commands)) as project:
            measure(f"{model}, {dtype}", findings, default, project)
    sys.exit(findings.close())
