"""`--stages` runs some of it; what a stage needs of an earlier one is checked and said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer

from evals.gsm8k.__main__ import main

Write = Callable[..., Path]
Further = Callable[..., list[str]]

pytestmark = pytest.mark.usefixtures("cluster")


def summary(results: Path) -> Any:
    content = json.loads((results / "summary.json").read_text())
    return {name: content[name] for name in ("counts", "incomplete", "conditions", "modes", "paired")}


def without_times(content: Any) -> Any:
    if isinstance(content, dict):
        timed = ("latency_s", "wall_s", "tokens_per_second")
        return {name: without_times(part) for name, part in content.items() if name not in timed}
    return content


def test_stages_one_after_another_give_what_one_run_gives(server: FakeServer, write_problems: Write) -> None:
    dataset = write_problems("", "[wrong]", "[cut]")
    results, whole = dataset.parent / "results", dataset.parent / "whole"
    asked = ["--base-url", server.base_url, "--dataset", str(dataset), "--max-tokens", "99"]
    assert main([*asked, "--results-dir", str(results), "--stages", "generate"]) == 0
    assert not (results / "summary.json").exists()
    requests = len(server.requests)
    # The options are those of the directory, and no server is asked.
    there = ["--results-dir", str(results), "--base-url", "http://127.0.0.1:9/v1"]
    assert main([*there, "--stages", "report"]) == 0
    assert len(server.requests) == requests
    assert main([*asked, "--results-dir", str(whole)]) == 0
    assert without_times(summary(results)) == without_times(summary(whole))


def test_a_key_reaches_the_task_and_no_file(
    server: FakeServer, write_problems: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-s3cret")  # which processes of the cluster do not have
    dataset = write_problems("", "", "")
    results = dataset.parent / "results"
    told = ["--base-url", server.base_url, "--dataset", str(dataset), "--results-dir", str(results)]
    assert main([*told, "--mode", "no-tools"]) == 0
    assert server.keys == {"Bearer sk-s3cret"}
    assert not [path for path in results.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]


def test_a_full_disk_ends_a_run_that_goes_on_once_there_is_room(
    server: FakeServer, write_problems: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = write_problems("", "", "")
    results = dataset.parent / "results"
    told = ["--base-url", server.base_url, "--dataset", str(dataset), "--mode", "no-tools"]
    results.mkdir()
    (results / "dataset.jsonl").symlink_to("/dev/full")
    assert main([*told, "--results-dir", str(results)]) == 2
    assert "No space left on device; fix this, then run again with --resume" in capsys.readouterr().err
    assert main(["--results-dir", str(results), "--resume"]) == 0
    assert summary(results)["counts"] | {"samples": 3, "missing": 0} == summary(results)["counts"]
    assert len((results / "dataset.jsonl").read_text().splitlines()) == 3


def test_answers_without_a_report_say_all_the_same_what_failed(
    server: FakeServer, write_problems: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = write_problems("", "[refused]")
    here = ["--results-dir", str(dataset.parent / "results"), "--base-url", server.base_url]
    assert main([*here, "--dataset", str(dataset), "--mode", "no-tools", "--stages", "generate"]) == 1
    assert "evals.gsm8k: 1 of 2 samples failed" in capsys.readouterr().err


def test_a_report_alone_takes_no_other_options_than_the_run(
    server: FakeServer, write_problems: Write, further: Further, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = write_problems("")
    here = ["--results-dir", str(dataset.parent / "results"), "--base-url", server.base_url]
    asked = ["--collect-activations", "--capture", '{"points": ["norm.output"]}', "--stages", "generate"]
    main([*here, "--dataset", str(dataset), "--mode", "no-tools", *asked])
    others: dict[str, Any] = {"rewards": {"format": 1}, "rule": "strict", "max_tokens": 7, "capture": {"layers": "all"}}
    for name, value in others.items():
        assert main([*here, "--stages", "report", *further(**{name: value})]) == 2
        assert f"holds an evaluation with different {name}; leave these options" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--stages", "report"], ["--resume"]])
def test_without_an_evaluation_there_is_nothing_to_report_or_resume(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--results-dir", str(tmp_path / "none"), *options])
    assert ended.value.code == 2
    assert "has no options of an evaluation" in capsys.readouterr().err


def test_a_stage_that_fails_is_named_with_its_reason(
    tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results-dir", str(tmp_path / "results")]
    assert main([*results, "--base-url", "http://127.0.0.1:9/v1"]) == 2
    assert "evals.gsm8k: generate: http://127.0.0.1:9/v1/models does not answer" in capsys.readouterr().err
    assert main([*results, "--base-url", server.base_url, "--dataset", "none.jsonl"]) == 2
    assert f"evals.gsm8k: generate: --dataset {Path('none.jsonl').absolute()}: no file" in capsys.readouterr().err


def test_new_tokens_that_leave_no_room_for_a_question_are_refused_before_any_is_asked(
    server: FakeServer, write_problems: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    server.told = {"max_model_len": 512}
    asked = ["--base-url", server.base_url, "--dataset", str(write_problems(""))]
    assert main([*asked, "--results-dir", str(write_problems("").parent / "results")]) == 2
    assert "--max-tokens 512: the model's context is 512 tokens with the question" in capsys.readouterr().err
    assert not server.requests
