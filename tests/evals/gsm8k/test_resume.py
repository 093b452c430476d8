"""Runs that end early: killed, interrupted, with failures, or without their server for a while."""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fake_openai import FakeServer

from evals.gsm8k.__main__ import main
from tests.waiting import until

Write = Callable[..., Path]
Further = Callable[..., list[str]]
LABELS = ["", "[wrong]", "[invalid]", "", "", "[wait]", "[wait]", "", "", ""]
MEASURED = ("latency_s", "modes", "times", "session_id")


@contextmanager
def running(env: dict[str, str], *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "evals.gsm8k", *argv], env=env, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr
        process.stderr.close()


def interrupted(happened: Callable[[], bool], argv: list[str]) -> int:
    """The status of a command that gets a Ctrl-C once something has happened."""

    def interrupt() -> None:
        until(happened, limit_s=120)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job ignores it
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            return main(argv)
    finally:
        signal.signal(signal.SIGINT, before)


def samples(results: Path) -> int:
    return len(list((results / "samples").glob("*.json")))


def summary(results: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((results / "summary.json").read_text())
    return content


def counted(results: Path) -> dict[str, Any]:
    """The summary without what two runs of the same problems need not share: times, and their own names."""

    def strip(value: Any) -> Any:
        return {k: strip(v) for k, v in value.items() if k not in MEASURED} if isinstance(value, dict) else value

    stripped: dict[str, Any] = strip(summary(results))
    stripped["config"].pop("results_dir")
    return stripped


def options(server: FakeServer, dataset: Path, results: Path) -> list[str]:
    where = ["--base-url", server.base_url, "--dataset", str(dataset), "--results-dir", str(results)]
    return [*where, "--variants", "control,calm", "--parallel", "2"]


def one_problem(server: FakeServer, write_problems: Write, directory: Path) -> list[str]:
    where = ["--base-url", server.base_url, "--dataset", str(write_problems(""))]
    return [*where, "--mode", "no-tools", "--results-dir", str(directory / "results")]


def resumed(results: Path, modes: int) -> None:
    """Goes on with a run, which then comes to what an unbroken one does."""
    conditions, expected = 2 * modes, 20 * modes
    before = {path: path.stat().st_mtime_ns for path in (results / "samples").iterdir()}
    assert main(["--resume", "--results-dir", str(results)]) == 0
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())  # nothing was asked again
    assert summary(results)["counts"] == {
        "problems": 10,
        "conditions": conditions,
        "samples": expected,
        "failed": 0,
        "missing": 0,
    }
    assert summary(results)["incomplete"] is None
    assert len((results / "dataset.jsonl").read_text().splitlines()) == expected
    assert pq.read_table(results / "samples.parquet").num_rows == expected


def test_a_killed_run_goes_on_to_the_summary_of_an_unbroken_one(
    server: FakeServer, cluster: Any, write_problems: Write, tmp_path: Path
) -> None:
    dataset = write_problems(*LABELS)
    with running(cluster.env, *options(server, dataset, tmp_path / "killed")) as process:
        until(lambda: samples(tmp_path / "killed") >= 10)  # the next ones wait
        process.send_signal(signal.SIGKILL)
        assert process.stderr
        seen = process.stderr.read().decode().replace("\r", "\n").splitlines()
    # One clean bar: nothing of Ray's own on the terminal.
    assert [line for line in seen if "tools:" in line] == [line for line in seen if line.strip()] != []
    assert not (tmp_path / "killed" / "summary.json").exists()
    with (tmp_path / "killed" / "dataset.jsonl").open("a") as lines:
        lines.write('{"half a li')
    server.release()
    resumed(tmp_path / "killed", modes=2)
    assert main(options(server, dataset, tmp_path / "unbroken")) == 0
    assert counted(tmp_path / "killed") == counted(tmp_path / "unbroken")


def test_a_task_that_dies_costs_only_the_requests_that_it_had_in_flight(
    server: FakeServer, cluster: Any, write_problems: Write, tmp_path: Path
) -> None:
    dataset = write_problems("[deadly]", *["", "[wrong]", "[invalid]"] * 5)
    where = ["--base-url", server.base_url, "--dataset", str(dataset), "--mode", "no-tools", "--parallel", "4"]
    assert main([*where, "--results-dir", str(tmp_path / "results")]) == 0
    assert (
        summary(tmp_path / "results")["counts"] | {"samples": 16, "failed": 0}
        == summary(tmp_path / "results")["counts"]
    )
    assert sorted(server.attempts.values())[-1] == 2


def test_an_interrupted_run_leaves_valid_results_and_goes_on(
    server: FakeServer, cluster: Any, write_problems: Write, tmp_path: Path
) -> None:
    results = tmp_path / "interrupted"
    argv = [*options(server, write_problems(*LABELS), results), "--mode", "no-tools"]
    assert interrupted(lambda: samples(results) >= 10, argv) == 1
    partial = summary(results)
    assert partial["incomplete"] == "interrupted"
    assert partial["counts"] | {"samples": samples(results), "missing": 20 - samples(results)} == partial["counts"]
    assert pq.read_table(results / "samples.parquet").num_rows == samples(results)
    assert len((results / "dataset.jsonl").read_text().splitlines()) == samples(results)
    server.release()
    resumed(results, modes=1)


def test_an_interruption_before_there_is_anything_to_report_ends_with_status_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path / "home"))
    results = tmp_path / "results"
    argv = ["--serve", "vitrine-demo", "--base-url", "http://127.0.0.1:0/v1", "--results-dir", str(results)]
    assert interrupted((results / "server.log").exists, argv) == 130
    assert not (results / "config.json").exists()


def test_answers_that_failed_to_be_stored_are_asked_again_and_stay_until_there_are_others(
    server: FakeServer,
    further: Further,
    cluster: Any,
    write_problems: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = tmp_path / "results"
    argv = ["--base-url", server.base_url, "--dataset", str(write_problems("", "[unstored]", "[pending]"))]
    argv += ["--results-dir", str(results), "--mode", "with-tools", "--collect-activations", *further(max_outage=0)]
    assert main(argv) == 1
    assert summary(results)["activations"]["why_not_stored"] == {  # two turns of each
        "the disk is full": 2,
        "the answer says 'pending'": 2,
    }
    server.up = True
    server.refused = "[unstored]"
    assert main(["--resume", "--results-dir", str(results)]) == 1
    assert "asked again, since they failed, were late or were not stored: 1" in capsys.readouterr().err
    assert summary(results)["counts"] | {"samples": 3, "failed": 0} == summary(results)["counts"]
    server.refused = None
    server.requests.clear()
    assert main(["--resume", "--results-dir", str(results)]) == 1
    assert len(server.requests) == 2
    found = summary(results)["activations"]
    assert (found["answers"], found["runs"], found["not_stored"]) == (6, 4, 2)
    assert len((results / "dataset.jsonl").read_text().splitlines()) == 3


def test_a_reward_that_fails_ends_the_evaluation_until_it_is_repaired(
    server: FakeServer,
    further: Further,
    cluster: Any,
    write_problems: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = tmp_path / "my_rewards.py"
    module.write_text("def brief(sample):\n    return {'1000': 0.5}[sample.gold]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    results = tmp_path / "results"
    argv = ["--base-url", server.base_url, "--dataset", str(write_problems("", "", "")), "--mode", "no-tools"]
    assert main([*argv, "--results-dir", str(results), *further(rewards={"my_rewards.brief": 2})]) == 2
    assert "the reward my_rewards.brief failed" in capsys.readouterr().err
    module.write_text("def brief(sample):\n    return 0.25\n")
    importlib.reload(importlib.import_module("my_rewards"))
    assert main(["--resume", "--results-dir", str(results)]) == 0
    (condition,) = summary(results)["conditions"].values()
    assert condition["reward"] == 0.5  # of all: none is by the function as it was


def test_answers_are_scored_and_rewarded_otherwise_without_asking_again(
    server: FakeServer, further: Further, cluster: Any, write_problems: Write, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    argv = ["--base-url", server.base_url, "--dataset", str(write_problems("", "[wrong]", "[invalid]"))]
    assert main([*argv, "--results-dir", str(results), "--mode", "no-tools"]) == 0
    server.requests.clear()
    other = further(rule="flexible", rewards={"correctness": 1, "format": 2})
    assert main(["--resume", "--results-dir", str(results), *other]) == 0
    assert not server.requests
    rows = pq.read_table(results / "samples.parquet").to_pylist()
    assert [row["correct"] for row in rows] == [row["correct_flexible"] for row in rows]
    assert sorted((row["reward_correctness"], row["reward_format"], row["reward"]) for row in rows) == [
        (0.0, 1.0, 2.0),
        (1.0, 0.0, 1.0),
        (1.0, 1.0, 3.0),
    ]


def test_what_was_transferred_stays_so_until_there_is_more(
    server: FakeServer, further: Further, cluster: Any, write_problems: Write, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    argv = ["--base-url", server.base_url, "--dataset", str(write_problems("", "[down]")), "--mode", "no-tools"]
    assert main([*argv, "--results-dir", str(results), *further(max_outage=0)]) == 1
    transferred = results / "activations" / "transferred.json"
    transferred.parent.mkdir()
    transferred.write_text("{}")
    assert main(["--results-dir", str(results), "--stages", "report"]) == 1
    assert transferred.exists()
    server.up = True
    assert main(["--resume", "--results-dir", str(results)]) == 0
    assert not transferred.exists()


def test_another_run_is_not_mixed_into_an_earlier_one(
    server: FakeServer, cluster: Any, write_problems: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = one_problem(server, write_problems, tmp_path)
    assert main(argv) == 0
    before = summary(tmp_path / "results")
    others = {"max_tokens": "7", "variants": "control,calm"}
    for name, value in others.items():
        assert main([*argv, "--resume", f"--{name.replace('_', '-')}", value]) == 2
        assert f"was made with different {name}" in capsys.readouterr().err
    assert main(argv) == 2
    assert "--results-dir" in capsys.readouterr().err
    assert summary(tmp_path / "results") == before


def test_a_run_goes_on_from_another_directory(
    server: FakeServer,
    further: Further,
    cluster: Any,
    write_problems: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_problems("", "[down]")
    write_problems("", "", "", name="examples.jsonl")
    (tmp_path / "texts.yaml").write_text("control: ''\ncalm: Take your time.\n")
    monkeypatch.chdir(tmp_path)
    argv = ["--dataset", "problems.jsonl", "--few-shot", "examples.jsonl", "--variants", "texts.yaml"]
    argv += ["--base-url", server.base_url, "--mode", "no-tools", *further(max_outage=0)]
    assert main([*argv, "--results-dir", "results"]) == 1
    server.up = True
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["--resume", "--results-dir", "../results"]) == 0
