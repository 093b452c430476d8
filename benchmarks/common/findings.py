"""The results of a benchmark: collected and shown while it runs, written at the end."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.measuring import Measured, Ratio, Spread, Way, as_json, in_turn, ratio, same_outputs


def parser_of(description: str | None, results: str, rounds: int = 5) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks that keep findings.

    Args:
        description: The benchmark's own.
        results: The name its results have below `results/`.
        rounds: How often all ways are measured, unless asked for otherwise.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch")
    made.add_argument("--results", type=Path, default=Path("results") / results, help="without a suffix")
    return made


@dataclass
class Findings:
    """The results of one benchmark's run.

    Attributes:
        options: The run's: of `parser_of`.
        unit: What rates and the picture's bars measure.
        cases: Title -> what was found, by name.
        charts: Title -> bars.
        failed: What should not be: each ends the run with 1.
    """

    options: argparse.Namespace
    unit: str = "tokens/s"
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    charts: dict[str, list[report.Bar]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, title: str, name: str, found: Any) -> None:
        """Keep what was found of a case, under a name of its own; written at once as JSON."""
        self.cases.setdefault(title, {})[name] = found
        self._write()  # a long run that is cut short leaves what it has done

    def compare(
        self, title: str, part: str, ways: Sequence[Way], wanted: Sequence[Ratio], reference: str, rounds: int
    ) -> dict[str, Spread]:
        """Measure ways in turn; show and keep their rates and ratios.

        Args:
            title: The case's; where it names float32, all ways must generate the same.
            part: The case's part.
            ways: What is measured.
            wanted: The ratios.
            reference: The way whose outputs the others' are compared with.
            rounds: How often.

        Returns:
            The wanted ratios, by "way / base".
        """
        print(f"\n{title}: {part}", flush=True)
        measured = in_turn(ways, rounds, lambda text: print(text, flush=True), self.unit)
        found = {f"{each.of} / {each.to}": ratio(measured, each) for each in wanted}
        print(self._rates(title, measured, reference), _ratios(found), sep="\n", flush=True)
        same = {name: same_outputs(measured, name, reference) for name, way in measured.items() if way.outputs}
        if "float32" in title:
            self.failed += [f"{title}: greedy outputs of {name} differ" for name, (n, of) in same.items() if n < of]
        self.charts[f"{title}: {part}"] = [
            report.Bar(name, way.rate, min(way.rates), max(way.rates)) for name, way in measured.items()
        ]
        self.add(
            title,
            part,
            {
                "ways": as_json(measured, self.unit),
                "ratios": {name: asdict(spread) for name, spread in found.items()},
                "same_outputs": same,
            },
        )
        return found

    def require(self, title: str, part: str, ratios: Sequence[Ratio], least: float) -> None:
        """Fail where the median of one of these ratios, of a part that was compared, is below `least`."""
        found = self.cases[title][part]["ratios"]
        medians = {name: found[name]["median"] for name in (f"{each.of} / {each.to}" for each in ratios)}
        self.failed += [f"{name}: {it:.3f} is less than {least}" for name, it in medians.items() if it < least]

    def close(self) -> int:
        """Write and draw everything; gives the exit status: 1 if anything failed, else 0."""
        results = Path(self.options.results)
        self._write()
        if self.charts:
            report.picture(results.with_suffix(".png"), self.charts, self.unit)
        print(f"\nKept in {results}.json" + (f", drawn in {results}.png" if self.charts else ""))
        for reason in self.failed:
            print(f"FAILED {reason}")
        return int(bool(self.failed))

    def _write(self) -> None:
        options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self.options).items()}
        machine = report.machine(self.options.threads, getattr(self.options, "device", "cpu"))
        found = {"machine": machine, "options": options, "cases": self.cases, "failed": self.failed}
        report.write(Path(self.options.results).with_suffix(".json"), found)

    def _rates(self, title: str, measured: dict[str, Measured], reference: str) -> str:
        rows = []
        for name, way in measured.items():
            same, of = same_outputs(measured, name, reference)
            agrees = f"{same} of {of}" if way.outputs else "-"
            rows.append([name, f"{way.rate:,.0f}", f"{min(way.rates):,.0f} - {max(way.rates):,.0f}", agrees])
        return report.table(title, ["", self.unit, "range", "same outputs"], rows)


def _ratios(found: dict[str, Spread]) -> str:
    rows = [
        [name, f"{spread.median:.2f}", f"{spread.lowest:.2f} - {spread.highest:.2f}"] for name, spread in found.items()
    ]
    return report.table("", ["ratio", "median", "range"], rows)
