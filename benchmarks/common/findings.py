"""The results of a benchmark: collected and shown while it runs, written at the end."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.measuring import Measured, Ratio, Spread, Way, as_json, in_turn, ratio, same_outputs


@dataclass
class Findings:
    """What is kept of a run.

    Attributes:
        options: The run's.
        unit: What the picture's bars measure.
        cases: Title -> what was found, by name.
        charts: Title -> bars.
        failed: What should not be: each ends the run with 1.
    """

    options: argparse.Namespace
    unit: str = "tokens per second"
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    charts: dict[str, list[report.Bar]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, title: str, name: str, found: Any) -> None:
        """Keep what was found of a case."""
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
        measured = in_turn(ways, rounds, lambda text: print(text, flush=True))
        found = {f"{each.of} / {each.to}": ratio(measured, each) for each in wanted}
        print(_rates(title, measured, reference), _ratios(found), sep="\n", flush=True)
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
                "ways": as_json(measured),
                "ratios": {name: asdict(spread) for name, spread in found.items()},
                "same_outputs": same,
            },
        )
        return found

    def close(self) -> int:
        """Write and draw everything; the run's exit status."""
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


def _rates(title: str, measured: dict[str, Measured], reference: str) -> str:
    rows = []
    for name, way in measured.items():
        spread = Spread.of(way.rates)
        same, of = same_outputs(measured, name, reference)
        agrees = f"{same} of {of}" if way.outputs else "-"
        rows.append([name, f"{way.rate:.0f}", f"{spread.lowest:.0f} - {spread.highest:.0f}", agrees])
    return report.table(title, ["", "tokens/s", "range", "same outputs"], rows)


def _ratios(found: dict[str, Spread]) -> str:
    rows = [
        [name, f"{spread.median:.2f}", f"{spread.lowest:.2f} - {spread.highest:.2f}"] for name, spread in found.items()
    ]
    return report.table("", ["ratio", "median", "range"], rows)
