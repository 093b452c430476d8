"""Runs side by side: paired where they share problems, and what their configs have otherwise."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from made import HOSTILE, make_results

from evals.compare.__main__ import main
from evals.gsm8k.summary import conclude

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs the command: its status, and what it printed."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        status = main([str(arg) for arg in args])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def accuracies(directory: Path, key: str) -> dict[str, bool]:
    found = [json.loads(path.read_text()) for path in (directory / "samples").glob(f"*.{key}.json")]
    return {sample["id"]: sample["correct"] for sample in found if sample["correct"] is not None}


def test_runs_are_compared_problem_by_problem_in_the_conditions_that_they_share(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 60, variants=("control", "calm"))
    b = make_results(tmp_path / "b", 40, seed=1, skill=0.8, modes=("no-tools",), temperature=0.7)
    status, printed, _ = say(a, b)
    assert status == 0
    assert "with-tools.control" not in printed
    left, right = accuracies(a, "no-tools.control"), accuracies(b, "no-tools.control")
    shared = left.keys() & right.keys()
    difference = sum(right[i] - left[i] for i in shared) / len(shared)
    assert re.search(rf"b less a  \{f'{100 * difference:+.1f}'} points .* {len(shared)} problems", printed)
    for name, outcomes in {"a": left, "b": right}.items():
        assert re.search(rf"^{name} +{100 * sum(outcomes.values()) / len(outcomes):.1f}%", printed, re.MULTILINE)
    assert re.search(r"config\.temperature\n +a +0.0\n +b +0.7\n", printed)
    assert "config.results_dir" not in printed


def test_runs_with_one_condition_each_are_compared_though_it_is_another(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 20, modes=("no-tools",))
    b = make_results(tmp_path / "b", 20, modes=("with-tools",))
    status, printed, _ = say(a, b)
    assert status == 0
    assert "no-tools.control and with-tools.control" in printed
    assert "b less a" in printed


def test_each_of_several_runs_is_set_against_the_first(tmp_path: Path, say: Say) -> None:
    runs = [
        make_results(tmp_path / name / "run", 10, seed=seed, modes=("no-tools",)) for seed, name in enumerate("abc")
    ]
    status, printed, _ = say(*runs)
    assert status == 0
    assert re.findall(r"^(\w/run less \w/run)", printed, re.MULTILINE) == ["b/run less a/run", "c/run less a/run"]


def test_p_is_corrected_for_all_comparisons(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 40, skill=0.2)
    b = make_results(tmp_path / "b", 40, seed=1, skill=0.9)
    _, printed, _ = say(a, b, "--html", tmp_path / "page.html")
    found = [(float(p), float(by)) for p, by in re.findall(r"p = (\S+), (\S+) by Holm", printed)]
    (low, low_by), (high, high_by) = sorted(found)
    assert 0 < low_by == pytest.approx(2 * low, rel=0.05)
    assert high_by == max(high, low_by)
    assert '<td class="n">–</td>' not in (tmp_path / "page.html").read_text()


def test_runs_of_other_problems_say_that_they_share_none(tmp_path: Path, say: Say) -> None:
    a, b = (make_results(tmp_path / name, 4, modes=("no-tools",)) for name in "ab")
    for file in (b / "samples").iterdir():
        sample = json.loads(file.read_text())
        file.write_text(json.dumps(sample | {"id": f"f{sample['id'][1:]}"}))
    conclude(b, None)
    assert "share no answered problem" in say(a, b)[1]


def test_the_same_run_elsewhere_differs_in_nothing(tmp_path: Path, say: Say) -> None:
    a, b = (make_results(tmp_path / name, 4) for name in "ab")
    _, printed, _ = say(a, b)
    assert "their configs are the same" in printed
    assert "+0.0 points" in printed


def test_what_cannot_be_compared_is_said(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 2, modes=("no-tools",))
    b = make_results(tmp_path / "b", 2, modes=("with-tools",), variants=("control", "calm"))
    (tmp_path / "empty").mkdir()
    for others, reason in {
        (b,): "share no condition: a has no-tools.control; b has with-tools.control, with-tools.calm",
        (tmp_path / "empty",): "empty has no finished evaluation: there is no summary.json",
        (tmp_path / "none",): "none has no finished evaluation",
        (a,): "named twice",
    }.items():
        status, printed, complaint = say(a, *others)
        assert (status, printed) == (2, "")
        assert reason in complaint
    with pytest.raises(SystemExit, match="2"):
        say(a)


def test_a_link_to_a_run_is_that_run_and_is_refused_beside_it(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 2)
    (tmp_path / "latest").symlink_to(a)
    status, _, complaint = say(a, tmp_path / "latest")
    assert status == 2
    assert f"named twice: {a} and {tmp_path}/latest" in complaint
    assert "named twice" in say(a, tmp_path / "elsewhere" / ".." / "a")[2]


def test_a_run_is_called_as_it_was_given_also_by_a_link(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (make_results(tmp_path / name, 2) for name in "ab")
    (tmp_path / "latest").symlink_to(b)
    assert "latest less a" in say(a, tmp_path / "latest")[1]
    monkeypatch.chdir(b)
    assert "b less a" in say(Path("../a"), Path("."))[1]


def test_runs_of_one_name_in_two_directories_are_told_apart(tmp_path: Path, say: Say) -> None:
    runs = [make_results(tmp_path / name / "run", 2, seed=seed) for seed, name in enumerate(("x/one", "y/one", "y"))]
    (tmp_path / "link").symlink_to(tmp_path / "x")
    _, printed, _ = say(tmp_path / "link" / "one" / "run", *runs[1:])
    told = re.findall(r"^(\S+) less (\S+)", printed, re.MULTILINE)
    first = {a for _, a in told}
    assert [name for name in first if name.endswith("link/one/run")] == list(first)
    assert {b for b, _ in told} == {"y/one/run", f"{tmp_path.name}/y/run"}


def test_long_settings_are_compared_whole_and_told_where_they_differ(tmp_path: Path, say: Say) -> None:
    a, b = (make_results(tmp_path / name, 2) for name in "ab")
    text = "Solve it. " * 100
    for directory, end in ((a, "Say the answer."), (b, "Say why, too.")):
        told = json.loads((directory / "config.json").read_text())
        told["prompts"]["instruction"] = text + end
        (directory / "config.json").write_text(json.dumps(told))
    _, printed, _ = say(a, b, "--html", tmp_path / "page.html")
    assert re.search(r"prompts\.instruction\n +a +\.\.\..*Say the answer\.\n +b +\.\.\..*Say why, too\.", printed)
    page = (tmp_path / "page.html").read_text()
    assert "Say the answer." in page
    assert text not in page


def test_runs_of_different_rules_are_compared_by_the_first_ones(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 40, modes=("no-tools",), rule="flexible")
    b = make_results(tmp_path / "b", 40, modes=("no-tools",), rule="strict")
    _, printed, _ = say(a, b, "--html", tmp_path / "page.html")
    assert "b less a  +0.0 points" in printed
    assert "outcomes and rewards are by each evaluation's own rule" in printed
    assert "rewards are by each evaluation&#39;s own rule" in (tmp_path / "page.html").read_text()
    assert "flexible ±SE" in printed
    assert "strict ±SE" not in printed
    assert re.search(r"config\.rule\n +a +flexible\n +b +strict\n", printed)


def test_the_page_counts_outcomes_as_the_screen_does(tmp_path: Path, say: Say) -> None:
    runs = [make_results(tmp_path / name, 60, seed=seed, modes=("no-tools",)) for seed, name in enumerate("ab")]
    _, printed, _ = say(*runs, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for run in runs:
        condition = json.loads((run / "summary.json").read_text())["conditions"]["no-tools.control"]
        counts = [str(condition["outcomes"][kind]) for kind in ("invalid", "truncated", "timed_out", "failed")]
        assert condition["invalid"] > condition["outcomes"]["invalid"]  # cut answers have no number, too
        assert re.search(rf"^{run.name} .* to [0-9.]+ +{' +'.join(counts)} ", printed, re.MULTILINE)
        assert "".join(f'<td class="n">{count}</td>' for count in counts) in page


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(tmp_path: Path, say: Say) -> None:
    a = make_results(tmp_path / "a", 10)
    b = make_results(tmp_path / "b", 10, seed=2, skill=0.8, dataset=HOSTILE)
    status, printed, _ = say(a, b, "--html", tmp_path / "page.html")
    assert status == 0
    assert str(tmp_path / "page.html") in printed
    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text
    assert "&lt;/script&gt;" in text
    assert text.count("<h2") == 4
    assert not re.search(r'(?:src|href)="', text)
