"""Evaluations side by side, paired where they share problems."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from made import make_results

from evals.gsm8k.summary import conclude
from evals.report.__main__ import main

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs the command: its status, and what it printed."""

    def run(*args: Path) -> tuple[int, str, str]:
        status = main([str(arg) for arg in args])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def accuracies(directory: Path, key: str) -> dict[str, bool]:
    found = [json.loads(path.read_text()) for path in (directory / "samples").glob(f"*.{key}.json")]
    return {sample["id"]: sample["correct"] for sample in found if sample["correct"] is not None}


def test_runs_are_compared_problem_by_problem_in_the_conditions_that_they_share(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 60, variants=("control", "calm"))
    b = make_results(tmp_path / "b", 40, seed=1, skill=0.8, modes=("no-tools",))
    status, printed, _ = say(a, b)
    assert status == 0
    assert "with-tools.control" not in printed
    left, right = accuracies(a, "no-tools.control"), accuracies(b, "no-tools.control")
    shared = left.keys() & right.keys()
    difference = f"{100 * sum(right[i] - left[i] for i in shared) / len(shared):+.1f}"
    assert re.search(rf"b less a  \{difference} points .* {len(shared)} problems", printed)
    for name, outcomes in {"a": left, "b": right}.items():
        assert re.search(rf"^{name} +{100 * sum(outcomes.values()) / len(outcomes):.1f}%", printed, re.MULTILINE)
    page = (a / "report.html").read_text()
    assert "Other evaluations less this one, no-tools.control" in page
    assert f"<b>{difference}</b>" in page


def test_runs_with_one_condition_each_are_compared_though_it_is_another(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 20, modes=("no-tools",))
    b = make_results(tmp_path / "b", 20, modes=("with-tools",))
    status, printed, _ = say(a, b)
    assert status == 0
    assert "no-tools.control and with-tools.control" in printed
    assert "b less a" in printed


def test_each_of_several_runs_is_set_against_the_first_and_named_apart(tmp_path: Path, say: Say) -> None:
    runs = [make_results(tmp_path / name / "run", 10, seed=n, modes=("no-tools",)) for n, name in enumerate("abc")]
    status, printed, _ = say(*runs)
    assert status == 0
    assert re.findall(r"^(\w/run less \w/run)", printed, re.MULTILINE) == ["b/run less a/run", "c/run less a/run"]


def test_p_is_corrected_for_all_comparisons(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 40, skill=0.2)
    b = make_results(tmp_path / "b", 40, seed=1, skill=0.9)
    found = [(float(p), float(by)) for p, by in re.findall(r"p = (\S+), (\S+) by Holm", say(a, b)[1])]
    (low, low_by), (high, high_by) = sorted(found)
    assert 0 < low_by == pytest.approx(2 * low, rel=0.05)
    assert high_by == max(high, low_by)


def test_runs_of_other_problems_say_that_they_share_none(tmp_path: Path, say: Say) -> None:
    a, b = (make_results(tmp_path / name, 4, modes=("no-tools",)) for name in "ab")
    for file in (b / "samples").iterdir():
        sample = json.loads(file.read_text())
        file.write_text(json.dumps(sample | {"id": f"f{sample['id'][1:]}"}))
    conclude(b, None)
    assert "share no answered problem" in say(a, b)[1]


def test_what_cannot_be_compared_is_said(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 2, modes=("no-tools",))
    b = make_results(tmp_path / "b", 2, modes=("with-tools",), variants=("control", "calm"))
    (tmp_path / "latest").symlink_to(a)
    for other, reason in {
        b: "no condition with the first: a has no-tools.control; b has with-tools.control, with-tools.calm",
        tmp_path / "none": "none has no finished evaluation: there is no summary.json",
        tmp_path / "latest": f"named twice: {a}",
    }.items():
        status, printed, complaint = say(a, other)
        assert (status, printed) == (2, "")
        assert reason in complaint
    status, printed, complaint = say(a, make_results(tmp_path / "c", 2, modes=("no-tools",)), b)
    assert (status, "c less a" in printed) == (0, True)
    assert "b is not compared: it shares no condition with a: it has with-tools.control, with-tools.calm" in complaint


def test_runs_of_different_rules_are_compared_by_the_first_ones(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 40, modes=("no-tools",), rule="flexible")
    b = make_results(tmp_path / "b", 40, modes=("no-tools",), rule="strict")
    _, printed, _ = say(a, b)
    assert "b less a  +0.0 points" in printed
    assert "outcomes are by each evaluation's own rule" in printed
    assert "flexible ±SE" in printed
    assert "strict ±SE" not in printed


def test_the_page_escapes_the_names_of_other_evaluations(tmp_path: Path, say: Say) -> None:
    a, b = (make_results(tmp_path / name, 4, modes=("no-tools",)) for name in ("a", "<i>it"))
    assert say(a, b)[0] == 0
    page = (a / "report.html").read_text()
    assert "&lt;i&gt;it" in page
    assert "<i>it" not in page
