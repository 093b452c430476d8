"""Host memory while a request records both norms of 28 layers, 2,048 tokens: `python -m benchmarks.engine.memory`.

The rows go to disk as they do behind a server. Each scenario runs in a process of its own:
  no capture                       what generating alone takes
  capture                          at the disk's own speed
  capture, slow disk               a disk slower than the model, beside requests that record nothing
  no capture, beside the others    what those requests get without it

Ends with 1 where recording takes more than 256 MiB of resident memory beyond what the same requests take without.
"""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from benchmarks.common import report, settings
from benchmarks.common.findings import Findings
from benchmarks.ways.resident import MemorySample, Scenario, watch
from deployments.interrupts import terminate_as_interrupt

MIB = 2**20
LIMIT = 256 * MIB
PLAIN, CAPTURE = "no capture", "capture"
SLOW, BESIDE = "capture, slow disk, beside others", "no capture, beside others"
PAIRS = {CAPTURE: PLAIN, SLOW: BESIDE}


def scenarios(options: Any) -> list[Scenario]:
    """The four scenarios of the module's docstring."""
    model = options.model[0] if options.model else "thin-28x1024"
    (prompt,) = settings.work(model, options).prompts[:1]

    def scenario(name: str, capture: bool, disk: float | None, others: int) -> Scenario:
        directory = Path(options.results).parent
        return Scenario(name, model, prompt, options.new_tokens, capture, disk, others, directory, options.threads)

    return [
        scenario(PLAIN, False, None, 0),
        scenario(CAPTURE, True, None, 0),
        scenario(SLOW, True, options.slow_disk, options.others),
        scenario(BESIDE, False, None, options.others),
    ]


def show(title: str, found: dict[str, MemorySample]) -> None:
    """Print a table with a row for each scenario: MiB, seconds and tokens per second."""
    rows = []
    for name, seen in found.items():
        numbers = [seen.resident[0] / MIB, seen.growth / MIB, max(seen.held) / MIB, seen.stored / MIB]
        rows.append([name, *(f"{number:.0f}" for number in (*numbers, seen.marks["stored"], seen.others))])
    head = ["MiB", "at first", "peak growth", "rows held", "stored", "seconds", "others' tokens/s"]
    print(report.table(title, head, rows), flush=True)


def draw(path: Path, found: dict[str, MemorySample]) -> None:
    """Draw memory in MiB over time in seconds, a chart for each scenario."""
    figure, axes = pyplot.subplots(len(found), 1, figsize=(10, 3 * len(found)), squeeze=False)
    for axis, (name, seen) in zip(axes[:, 0], found.items(), strict=True):
        growth = [(resident - seen.resident[0]) / MIB for resident in seen.resident]
        axis.plot(seen.times, growth, label="resident memory beyond the start, but for KV", color="#4477aa")
        axis.plot(seen.times, [held / MIB for held in seen.held], label="recorded rows held", color="#ee6677")
        axis.axhline(LIMIT / MIB, color="#999999", linestyle="--", label="256 MiB")
        for mark, at in seen.marks.items():
            axis.axvline(at, color="#bbbbbb", linewidth=0.8)
            axis.annotate(mark, (at, 0), rotation=90, fontsize=7, va="bottom", ha="right")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("seconds")
        axis.set_ylabel("MiB")
        axis.legend(fontsize=7)
    report.keep(path, figure)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parser = settings.parser(__doc__, "benchmark-memory")
    parser.set_defaults(new_tokens=2048)
    parser.add_argument("--slow-disk", type=float, default=5e6, help="bytes per second")
    parser.add_argument("--others", type=int, default=8, help="requests beside it that record nothing")
    options = parser.parse_args(arguments)
    findings, found = Findings(options), dict[str, MemorySample]()
    spawn = multiprocessing.get_context("spawn")
    for scenario in scenarios(options):
        with spawn.Pool(1) as apart:  # ended on the way out, Ctrl-C included
            found[scenario.name] = apart.apply(watch, (scenario,))
        findings.add(f"{scenario.model}, float32", scenario.name, asdict(found[scenario.name]))
        print(f"  {scenario.name}: done", flush=True)
    for capturing, plain in PAIRS.items():
        more = found[capturing].growth - found[plain].growth
        findings.add(f"{scenario.model}, float32", f"{capturing}: bytes beyond {plain}", more)
        print(f"  {capturing}: {more / MIB:.0f} MiB beyond {plain}")
        if more > LIMIT:
            findings.failed.append(f"{capturing}: {more / MIB:.0f} MiB more than without")
    show(f"{scenario.model}: {options.new_tokens} tokens", found)
    draw(Path(options.results).with_suffix(".png"), found)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
