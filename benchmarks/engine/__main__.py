"""The engine compared with its peers, in one process and without Ray: `python -m benchmarks.engine`.

Parts:
  ways      tokens per second of the bare loop, transformers, nnsight and the engine, with and without capture
  arrivals  requests that arrive one by one, and the gaps between a request's tokens
  wide      capture of 28 layers of hidden size 1024 and both norms to disk, few tokens
  floor     where a decode step's time goes, and how fast the hardware could do it
  sweep     transformers' continuous batching at many settings (only where asked for)

Ends with 1 where greedy tokens in float32 differ, or the engine is behind `generate`'s static batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.common import measured_models, report, settings
from benchmarks.common.findings import Findings
from benchmarks.common.measuring import Ratio
from benchmarks.common.work import Work
from benchmarks.ways import floor, ours, peers, storing
from deployments.engine.engine import Engine
from deployments.engine.request import Sampling
from deployments.model.model import Model
from deployments.options import DEMO, Options

BARE, ENGINE, STATIC, BATCH = (
    "bare loop of the same forwards",
    "engine",
    "generate, one static batch",
    "generate_batch",
)
MEMORY, DISK = "engine, all layer outputs to memory", "engine, all layer outputs to disk"
STEERED = "engine, a steering vector for each request"
ARRIVING = "engine, Poisson arrivals"


@dataclass(frozen=True)
class Case:
    """One model in one dtype on one device."""

    name: str
    dtype: str
    device: str
    options: argparse.Namespace

    @property
    def title(self) -> str:
        """How tables and pictures call it."""
        return f"{self.name}, {self.dtype}, {self.device}"

    def hf(self) -> Any:
        """The model, new each time: nnsight instruments what it is given."""
        return measured_models.build(self.name, settings.DTYPES[self.dtype], self.device)

    def work(self, new_tokens: int | None = None) -> Work:
        """The prompts, and how many tokens are generated."""
        return settings.work(self.name, self.options, self.device, new_tokens)

    def engine(self) -> Engine:
        """An engine that takes all requests at once."""
        model = Model(self.hf(), measured_models.tokenizer(self.name), self.name)
        memory = Options().capture_memory_bytes  # as a server has it
        return Engine(model, max_running=max(64, self.options.requests), capture_bytes=memory)


def measure_ways(case: Case, findings: Findings) -> None:
    """Measure the tokens per second of everything that generates."""
    work, plain, tokenizer = case.work(), case.hf(), measured_models.tokenizer(case.name)
    running = case.engine()
    with storing.store(case.options.results.parent) as store:
        ways = [
            ours.bare(running, work),
            ours.engine(running, work),
            ours.engine(running, work, ours.LAYERS, MEMORY),
            ours.engine_storing(running, work, ours.LAYERS, store, DISK),
            ours.engine_steered(running, work, STEERED),
            peers.static_generate(plain, work),
            static_capturing := peers.static_generate(plain, work, capture=True),
            peers.generate_batch(plain, work),
            batch_capturing := peers.generate_batch(plain, work, capture=True),
            nnsight_static := peers.nnsight_static(case.hf(), tokenizer, work),
            nnsight_each := peers.nnsight_each(case.hf(), tokenizer, work, min(2, case.options.requests)),
        ]
        wanted = [
            *(Ratio(ENGINE, base) for base in (BARE, STATIC, BATCH)),
            *(Ratio(way, ENGINE) for way in (MEMORY, DISK, STEERED)),
            *(Ratio(MEMORY, way.name) for way in (static_capturing, batch_capturing, nnsight_static, nnsight_each)),
        ]
        found = findings.compare(case.title, "ways", ways, wanted, ENGINE, case.options.rounds)
    if found[f"{ENGINE} / {STATIC}"].median < 1:
        findings.failed.append(f"{case.title}: the engine is behind the static batch")


def measure_arrivals(case: Case, findings: Findings) -> None:
    """Measure requests that come one by one: tokens per second, and gaps between a request's tokens in steps and ms."""
    work, running = case.work(), case.engine()
    together = ours.engine(running, work)
    took = statistics.median(together.run().seconds for _ in range(3))
    arriving = ours.arriving(running, work, lambda: took / 2, ARRIVING)
    ways, wanted = [together, arriving], [Ratio(ARRIVING, ENGINE)]
    findings.compare(case.title, "arrivals", ways, wanted, ENGINE, case.options.rounds)
    spaced = [i * work.new_tokens // (2 * len(work.prompts)) for i in range(len(work.prompts))]
    rows, kept = [], {}
    for name, arrivals in (("all at once", [0] * len(spaced)), ("arriving over half the steps", spaced)):
        gaps = ours.gaps(running, work, arrivals)
        steps, seconds = sorted(gap.steps for gap in gaps), sorted(gap.seconds for gap in gaps)
        last = round(0.99 * (len(gaps) - 1))
        kept[name] = {
            "steps": {"median": statistics.median(steps), "p99": steps[last]},
            "ms": {"median": 1e3 * statistics.median(seconds), "p99": 1e3 * seconds[last]},
        }
        rows.append([name, *(f"{kept[name][unit][of]:.3g}" for unit in ("steps", "ms") for of in ("median", "p99"))])
    head = ["gaps between a request's tokens", "steps", "p99", "ms", "p99"]
    print(report.table(case.title, head, rows), flush=True)
    findings.add(case.title, "gaps", kept)


def measure_wide(case: Case, findings: Findings) -> None:
    """Measure tokens per second without capture, and with 28 layers and both norms captured to disk."""
    work, running = case.work(min(16, case.options.new_tokens)), case.engine()
    name = "engine, all layer outputs and both norms to disk"
    with storing.store(case.options.results.parent) as store:
        ways = [
            ours.engine(running, work),
            ours.engine_storing(running, work, ours.LAYERS_AND_NORMS, store, name),
        ]
        findings.compare(case.title, "wide", ways, [Ratio(name, ENGINE)], ENGINE, max(1, case.options.rounds // 2))


def measure_floor(case: Case, findings: Findings) -> None:
    """Measure the milliseconds of a decode step's parts, and of what the hardware could do."""
    work, running = case.work(), case.engine()
    steps, rows = min(20, work.new_tokens), len(work.prompts)
    least = floor.floor(running.model, rows, case.device)
    kinds = {
        "greedy": floor.breakdown(running, work, steps),
        "all layer outputs captured": floor.breakdown(running, work, steps, capture=ours.LAYERS),
        "sampled": floor.breakdown(running, work, steps, sampling=Sampling(temperature=0.8, top_p=0.95)),
    }
    names = list(dict.fromkeys(name for parts in kinds.values() for name in parts))
    lines = [[name, *(f"{1e3 * parts.get(name, 0):.2f}" for parts in kinds.values())] for name in names]
    lines += [["a step", *(f"{1e3 * sum(parts.values()):.2f}" for parts in kinds.values())]]
    lines += [["times the floor", *(f"{sum(parts.values()) / least.seconds:.2f}" for parts in kinds.values())]]
    print(report.table(f"{case.title}: a decode step of {rows} rows, ms", ["", *kinds], lines))
    ops = floor.operations(running, work)
    print(
        report.table(
            "operations of a forward, under torch's profiler",
            ["", "number", "ms"],
            [[name, f"{kind.count:.0f}", f"{1e3 * kind.seconds:.2f}"] for name, kind in ops.items()],
        )
    )
    print(f"\nThe floor: weights read once {1e3 * least.reading:.2f} ms, products {1e3 * least.products:.2f} ms")
    found = {"floor": asdict(least), "parts": kinds, "operations": {name: asdict(kind) for name, kind in ops.items()}}
    findings.add(case.title, "floor", found)


def measure_sweep(case: Case, findings: Findings) -> None:
    """Measure the tokens per second of transformers' continuous batching at many settings."""
    work, plain = case.work(), case.hf()
    ways = [ours.engine(case.engine(), work), *peers.sweep(plain, work)]
    wanted = [Ratio(way.name, ENGINE) for way in ways[1:]]
    findings.compare(case.title, "sweep", ways, wanted, ENGINE, case.options.rounds)


MEASURES = {
    "ways": measure_ways,
    "arrivals": measure_arrivals,
    "wide": measure_wide,
    "floor": measure_floor,
    "sweep": measure_sweep,
}


def cases(options: argparse.Namespace) -> list[tuple[str, Case]]:
    """Each part to be measured, and the model, dtype and device that it is measured on."""
    gpu = torch.device(options.device).type == "cuda"
    named = options.model or (["qwen3-0.6b"] if gpu else ["random-40m", DEMO])
    wide = options.wide_model or ("qwen3-0.6b" if gpu else "qwen3-0.6b-small-vocabulary")
    return [
        (part, Case(name, dtype, options.device, options))
        for dtype in settings.dtypes(options, options.device)
        for part in options.part or list(MEASURES)[:-1]
        for name in ([wide] if part == "wide" else named)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    parser = settings.parser(__doc__, "benchmark-engine")
    parser.add_argument("--part", choices=MEASURES, action="append", help="again for more than one; all but sweep")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or a torch device")
    parser.add_argument("--wide-model", choices=measured_models.NAMES, help="the model of the part `wide`")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    findings = Findings(options)
    for part, case in cases(options):
        MEASURES[part](case, findings)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
