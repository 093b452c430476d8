"""What a run ends with on the terminal, its exit code with it: made of the results directory, without a server."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from made import make_results

from evals.gsm8k import stages
from evals.results.results import FOLDER, read_config

WHY = "the disk is full"


def report(directory: Path) -> int:
    return stages.report(read_config(directory), None)


def stored(run_id: str, dtype: str = "float32") -> dict[str, Any]:
    at = {"uri": "file:///gone/evaluated/1.arrow", "first_row": 0, "shape": [3, 4], "dtype": dtype}
    run = {"index": 0, "run_id": run_id, "tokens": 3, "prompt_tokens": 2, "points": {"layers.0.output": at}}
    return {"session_id": "evaluated", "status": "stored", "runs": [run]}


def unstored(run_id: str) -> dict[str, Any]:
    return stored(run_id) | {"status": "failed", "reason": WHY}


def answered(directory: Path, **options: Any) -> Path:
    return make_results(directory, 4, modes=("no-tools",), skill=1.0, **options)


def test_all_that_was_asked_for_and_stored_ends_in_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(answered(tmp_path / "run", activations=stored)) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "not confirmed" not in said.out


def test_activations_that_were_asked_for_and_not_stored_end_in_status_1_with_the_reason_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = answered(tmp_path / "run", activations=unstored)
    assert report(directory) == 1
    said = capsys.readouterr()
    line = f"activations of 4 of 4 answers were not confirmed as stored: {WHY} (4)"
    assert said.err.strip() == f"evals.gsm8k: {line}"
    assert line in said.out
    recorded = json.loads((directory / "summary.json").read_text())["activations"]
    assert (recorded["not_stored"], recorded["why_not_stored"], recorded["runs"]) == (4, {WHY: 4}, 0)
    page = (directory / "report.html").read_text()
    assert "Activations of 4 of 4 answers were not confirmed as stored" in page
    assert f"<li>4 × {WHY}</li>" in page


def test_what_is_not_stored_is_no_reason_to_say_that_a_transfer_lacks_it(tmp_path: Path) -> None:
    directory = answered(tmp_path / "run", activations=unstored, transfer_activations=True)
    assert json.loads((directory / "summary.json").read_text())["incomplete"] is None
    assert not (directory / FOLDER).exists()


@pytest.mark.parametrize("modes", [("no-tools",), ("no-tools", "with-tools")])
def test_variants_without_the_control_are_compared_with_nothing_and_that_is_said(
    tmp_path: Path, modes: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_results(tmp_path / "run", 4, modes=modes, variants=("calm", "anxiety"))
    report(directory)
    said = "o variant is compared with control, which was not among --variants"
    summary = json.loads((directory / "summary.json").read_text())
    assert said in summary["not_paired"]
    assert {pair["kind"] for pair in summary["paired"]} == ({"mode"} if len(modes) > 1 else set())
    assert said in capsys.readouterr().out
    assert said in (directory / "report.html").read_text()


def test_a_standard_error_that_is_not_known_to_be_0_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(answered(tmp_path / "run"))
    said = capsys.readouterr().out
    assert "±0.0" not in said
    assert re.search(r"no-tools +100\.0% +[0-9.]+ to 100\.0", said)


def test_thoughts_are_counted_on_the_screen_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = answered(tmp_path / "run")
    for path in [*(directory / "samples").iterdir()][:3]:
        sample = json.loads(path.read_text())
        sample["messages"][-1]["reasoning_content"] = "I add."
        sample["turns"][-1]["reasoning_tokens"] = 7
        path.write_text(json.dumps(sample))
    report(directory)
    assert "no-tools: 3 of 4 samples with reasoning, 21 tokens of them counted" in capsys.readouterr().out
    assert "3 of 4 samples with reasoning, 21 tokens of them counted" in (directory / "report.html").read_text()
