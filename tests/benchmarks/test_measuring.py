"""Timing of ways in turn, and ratios of their rates."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.harness import Findings, Run, Way, in_turn, parser


def way(name: str, seconds: list[float], log: list[str]) -> Way:
    turns = iter(seconds)

    def run() -> Run:
        log.append(name)
        return Run(1, next(turns))

    return Way(name, run)


def test_ways_run_in_turn_and_every_other_round_backwards():
    log: list[str] = []
    in_turn([way("a", [1] * 4, log), way("b", [1] * 4, log)], 3)
    assert "".join(log) == "ab" + "ab" + "ba" + "ab"


@pytest.mark.parametrize(("least", "status"), [(1.9, 0), (2.1, 1)])
def test_a_ratio_is_taken_within_each_round_and_fails_below_its_least(tmp_path, least, status):
    measured = in_turn([way("base", [9, 1.0, 2.0, 4.0], []), way("twice", [9, 0.5, 1.0, 2.0], [])], 3)
    path = tmp_path / "results" / "found.json"
    findings = Findings(parser(None, "found").parse_args([f"--results={path}"]))
    findings.add("case", measured, {("twice", "base"): least})
    assert findings.close() == status
    found = json.loads(path.read_text())
    assert found["cases"]["case"]["ratios"]["twice / base"] == [2, 2, 2]  # however the machine's pace changed
    assert len(found["failed"]) == status
