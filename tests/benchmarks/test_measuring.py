"""Timing of ways, and the tables of their results."""

from __future__ import annotations

import json

from benchmarks.common import report
from benchmarks.common.measuring import Ratio, Run, Way, in_turn, ratio, same_outputs
from benchmarks.common.questions import texts


def way(name: str, seconds: list[float], outputs: list[list[int]], log: list[str]) -> Way:
    turns = iter(seconds)

    def run() -> Run:
        log.append(name)
        return Run.of(outputs, next(turns))

    return Way(name, run)


def test_ways_run_in_turn_and_every_other_round_backwards():
    log: list[str] = []
    in_turn([way("a", [1] * 4, [[1]], log), way("b", [1] * 4, [[1]], log)], 3, say=lambda _: None)
    assert "".join(log) == "ab" + "ab" + "ba" + "ab"


def test_a_ratio_is_taken_within_each_round():
    log: list[str] = []
    base = way("base", [9, 1.0, 2.0, 4.0], [[1, 2]], log)
    twice = way("twice", [9, 0.5, 1.0, 2.0], [[1, 2]], log)
    spread = ratio(in_turn([base, twice], 3, say=lambda _: None), Ratio("twice", "base"))
    assert (spread.lowest, spread.median, spread.highest) == (2, 2, 2)  # however the machine's pace changed


def test_outputs_are_compared_request_by_request_as_far_as_a_way_ran_them():
    log: list[str] = []
    all_three = way("all", [1, 1], [[1], [2], [3]], log)
    first_two = way("two", [1, 1], [[1], [5]], log)
    assert same_outputs(in_turn([all_three, first_two], 1, say=lambda _: None), "two", "all") == (1, 2)


def test_a_table_lines_its_columns_up():
    lines = report.table("title", ["", "n"], [["short", "1"], ["much longer", "100"]]).splitlines()
    assert len({len(line) for line in lines[2:]}) == 1
    assert lines[-1].startswith("much longer")


def test_prompts_begin_again_where_the_file_has_fewer(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in "ab"))
    assert texts(file, 5) == list("ababa")
