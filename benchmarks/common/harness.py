"""Ways of doing the same work, timed in turn within one run, and the tables and JSON of what they took."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deployments.command_line import Formatter

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "nnsight", "ray", "pyarrow")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Tokens = list[list[int]]


@dataclass(frozen=True)
class Run:
    """One turn of a way.

    Attributes:
        count: What rates count, as generated tokens.
        seconds: How long that took.
        outputs: The tokens of each request, where ways are compared by them.
    """

    count: int
    seconds: float
    outputs: Tokens | None = None

    @property
    def rate(self) -> float:
        """Counted per second."""
        return self.count / self.seconds


@dataclass(frozen=True)
class Way:
    """A named way of doing the work; each call of `run` does all of it once."""

    name: str
    run: Callable[[], Run]


def parser(description: str | None, results: str, rounds: int = 5) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks.

    Args:
        description: The benchmark's docstring.
        results: The name of its results below `results/`.
        rounds: How often all ways are measured, unless asked for otherwise.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=Formatter)
    made.add_argument("--rounds", type=int, metavar="N", default=rounds, help="measurements of each baseline")
    made.add_argument("--threads", type=int, metavar="N", default=os.cpu_count() or 1, help="torch threads")
    path = Path("results") / f"{results}.json"
    made.add_argument("--results", type=Path, metavar="FILE", default=path, help="JSON file for the results")
    return made


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its work; return at once on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Tokens], device: str = "cpu") -> Run:
    """Time something that gives each request's tokens; the device's work counts."""
    synchronize(device)
    began = time.perf_counter()
    tokens = work()
    synchronize(device)
    return Run(sum(map(len, tokens)), time.perf_counter() - began, tokens)


def in_turn(ways: Sequence[Way], rounds: int) -> dict[str, list[Run]]:
    """Run every way once for nothing, then all of them in turn, every other round backwards.

    So that a machine which slows down or speeds up does so for all of them alike.

    Returns:
        Way's name -> its run of each round.
    """
    for way in ways:
        print(f"  {way.name}: {way.run().rate:,.0f}/s at first", flush=True)
    measured: dict[str, list[Run]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            measured[way.name].append(way.run())
    return measured


class Findings:
    """The results of a benchmark: shown as they come, written at the end; `failed` has what should not be."""

    def __init__(self, options: argparse.Namespace, unit: str = "tokens/s") -> None:
        """Nothing yet; options are those of `parser`, and unit is what rates count."""
        self.failed: list[str] = []
        self._options, self._unit = options, unit
        self._cases: dict[str, Any] = {}

    def add(
        self, title: str, measured: Mapping[str, Sequence[Run]], ratios: Mapping[tuple[str, str], float | None]
    ) -> None:
        """Show a case's rates, and ratios of rates within each round.

        Args:
            title: The case's.
            measured: Way's name -> its runs.
            ratios: (way, base) -> the least median that does not fail, or None.
        """
        rates = {name: [run.rate for run in runs] for name, runs in measured.items()}
        print(_table(title, self._unit, rates, ",.0f"), flush=True)
        found = {}
        for (way, base), least in ratios.items():
            name = f"{way} / {base}"
            found[name] = [rate / other for rate, other in zip(rates[way], rates[base], strict=True)]
            if least is not None and statistics.median(found[name]) < least:
                self.failed.append(f"{title}: {name} is less than {least}")
        if found:
            print(_table(title, "ratio", found, ".2f"), flush=True)
        self._cases[title] = {self._unit: rates, "ratios": found}

    def close(self) -> int:
        """Write everything; gives the exit status: 1 if anything failed, else 0."""
        options, results = vars(self._options), self._options.results
        found = {
            "machine": _machine(options.get("device", "cpu")),
            "options": {name: str(value) for name, value in options.items()},
            "cases": self._cases,
            "failed": self.failed,
        }
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(found, indent=2) + "\n")
        print("\n".join([f"\nWritten to {results}", *(f"FAILED {reason}" for reason in self.failed)]))
        return int(bool(self.failed))


def _table(title: str, unit: str, rows: Mapping[str, Sequence[float]], form: str) -> str:
    """The median and the range of each row."""
    width = max(map(len, rows))
    lines = [
        f"{name:{width}}  {statistics.median(row):>9{form}}  {min(row):>9{form}} to {max(row):{form}}"
        for name, row in rows.items()
    ]
    return "\n".join([f"\n{title}", f"{'':{width}}  {unit:>9}      range", *lines])


def _machine(device: str) -> dict[str, Any]:
    """The platform, processor or GPU, number of cores, and versions that this was measured with."""
    capabilities = torch.cpu.get_capabilities()
    units = [unit for unit in ("amx_bf16", "avx512_bf16", "avx512_f", "avx2") if capabilities.get(unit)]
    processor = f"{capabilities.get('cpu_name', platform.processor())} ({', '.join(units)})"
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else processor
    found = {"platform": platform.platform(), "cores": os.cpu_count(), "device": name}
    return found | {package: importlib.metadata.version(package) for package in PACKAGES}
