import json
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from fake_openai import POINT, FakeServer

from evals.config import Config
from evals.gsm8k.__main__ import main
from evals.gsm8k.options import parse_args
from evals.task.problems import load_problems
from evals.task.prompts import Prompts
from evals.task.rollouts import connect, run_all
from evals.task.trajectory import Sample
from tests.waiting import until

Write = Callable[..., Path]
Further = Callable[..., list[str]]

pytestmark = pytest.mark.usefixtures("cluster")


def evaluate(server: FakeServer, dataset: Path, *options: str) -> tuple[int, dict[str, Any], Path]:
    results = dataset.parent / "results"
    where = ["--base-url", server.base_url, "--dataset", str(dataset), "--results-dir", str(results)]
    code = main([*where, *options])
    return code, json.loads((results / "summary.json").read_text()), results


def lines(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (results / "dataset.jsonl").read_text().splitlines()]


def samples_of(server: FakeServer, dataset: Path, parallel: int) -> tuple[Config, Iterator[Sample]]:
    connect()
    argv = ["--base-url", server.base_url, "--dataset", str(dataset), "--parallel", str(parallel)]
    config = parse_args([*argv, "--model", "fake/model"])
    return config, run_all(load_problems(config), "no-tools", config, Prompts({"control": ""}))


def test_an_abandoned_run_asks_nothing_more(server: FakeServer, write_problems: Write, tmp_path: Path) -> None:
    _, samples = samples_of(server, write_problems("", *["[wait]"] * 300), parallel=2)
    next(samples)
    cast(Generator[Sample], samples).close()
    until(lambda: not server.connections)  # its process is killed a moment after the close
    server.release()
    assert evaluate(server, write_problems("", "", "", name="later.jsonl"), "--mode", "no-tools")[0] == 0
    assert len(server.requests) <= 1 + 2 + 3  # what was answered, what was in flight, and what came later


def test_both_modes_are_scored_paired_and_written(server: FakeServer, write_problems: Write) -> None:
    labels = ["", "", "[wrong]", "[invalid]", "[cut]", "[busy]"]
    code, summary, results = evaluate(server, write_problems(*labels), "--collect-activations")
    assert code == 0
    plain = summary["conditions"]["no-tools.control"]
    assert (plain["strict"]["correct"], plain["flexible"]["correct"], plain["strict"]["of"]) == (3, 4, 6)
    assert (plain["normalized"]["correct"], summary["rule"]) == (3, "normalized")
    assert (plain["invalid"], plain["truncated"], plain["failed"]) == (2, 1, 0)
    assert (plain["prompt_tokens"], plain["completion_tokens"]) == (66, 30)
    assert plain["outcomes"] | {"correct": 3, "wrong": 1, "invalid": 1, "truncated": 1} == plain["outcomes"]
    assert summary["modes"]["no-tools"]["tokens_per_second"] > 0
    (pair,) = summary["paired"]
    assert (pair["a"], pair["b"], pair["problems"]) == ("no-tools.control", "with-tools.control", 6)
    assert summary["counts"] == {"problems": 6, "conditions": 2, "samples": 12, "failed": 0, "missing": 0}
    rows = lines(results)
    assert len({(row["id"], row["mode"]) for row in rows}) == 12
    for row in rows:
        sample = json.loads((results / "samples" / f"{row['id']}.{row['mode']}.control.json").read_text())
        assert len(sample["messages"]) == (2 if row["mode"] == "no-tools" else 4)
        assert row["question"] == sample["question"]


def test_the_report_says_where_activations_lie_and_how_to_load_one(
    server: FakeServer, write_problems: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--collect-activations", "--mode", "no-tools"]
    code, summary, results = evaluate(server, write_problems("", "", ""), *options)
    recorded = summary["activations"]
    assert code == 0
    assert (recorded["points"], recorded["runs"]) == ([POINT], 3)
    assert (recorded["tokens"], recorded["bytes"], recorded["files"]) == (48, 3 * 16 * 8 * 2, 1)
    assert (recorded["where"], recorded["not_stored"]) == (["file:///data/s"], 0)
    row = next(row for row in lines(results) if row["activation_uris"])
    assert (row["session_id"], row["activation_uris"]) == (recorded["session_id"], ["file:///data/s/000001.arrow"])
    printed = capsys.readouterr().out
    assert str(results) in printed
    assert "from vitrine import load\nrun = load(" in printed
    assert f'print(run["{POINT}"].shape)' in printed


def test_every_problem_counts_but_those_that_the_server_did_not_answer(
    server: FakeServer, further: Further, write_problems: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = {"": "correct", "[wrong]": "wrong", "[invalid]": "invalid", "[cut]": "truncated", "[wide]": "truncated"}
    counted |= {"[full]": "truncated", "[late]": "timed_out", "[loop]": "turn_limit"}
    left_out = {
        "[down]": f"http://127.0.0.1:{server.port} does not answer: HTTP 503: no room",
        "[torn]": f"http://127.0.0.1:{server.port} does not answer: ",
        "[broken]": "HTTP 500: a fault of request 7",
        "[refused]": "HTTP 400: prompt is not to my liking",
        "[long]": "HTTP 400: max_tokens: too many: lower --max-tokens",
    }
    options = ["--mode", "with-tools", *further(max_outage=0)]
    code, summary, results = evaluate(server, write_problems(*counted, *left_out), *options)
    assert code == 1
    assert "5 of 13 samples failed" in capsys.readouterr().err
    rows = {row["question"].partition("]")[0] + "]": row for row in lines(results)}
    assert {label: rows.get(label, rows[" What is 0 + 1000?]"])["outcome"] for label in counted} == counted
    for label, reason in left_out.items():
        assert (rows[label]["outcome"], rows[label]["correct"]) == ("failed", None)
        assert rows[label]["error"].startswith(reason)
    (condition,) = summary["conditions"].values()
    assert (condition["failed"], condition["timed_out"], condition["turn_limit"]) == (5, 1, 1)
    for rule in ("strict", "flexible", "normalized"):
        assert condition[rule]["of"] == 8
    assert (condition["normalized"]["correct"], condition["rewards"]["correctness"]) == (1, 1 / 8)


def test_an_answer_that_is_late_is_wrong_and_asked_for_once(
    server: FakeServer, further: Further, write_problems: Write
) -> None:
    problems = write_problems("[wait]", "[wait]")
    code, summary, results = evaluate(server, problems, "--mode", "no-tools", *further(timeout=2))
    (condition,) = summary["conditions"].values()
    assert (code, len(server.requests)) == (0, 2)
    assert (condition["timed_out"], condition["normalized"]["of"], condition["normalized"]["accuracy"]) == (2, 2, 0.0)
    server.release()
    assert main(["--resume", "--results-dir", str(results)]) == 0
    assert len(server.requests) == 2


def test_tokens_that_a_server_does_not_count_are_not_known(
    server: FakeServer, further: Further, write_problems: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    code, summary, results = evaluate(server, write_problems("[uncounted]"), "--mode", "no-tools")
    assert code == 0
    assert summary["conditions"]["no-tools.control"]["completion_tokens_per_sample"]["mean"] is None
    assert summary["modes"]["no-tools"]["tokens_per_second"] is None


def test_all_slots_are_in_use_at_once(server: FakeServer, write_problems: Write) -> None:
    server.gather = 8  # answers only where 8 requests are there together
    _, samples = samples_of(server, write_problems(*["[gather]"] * 64), parallel=8)
    assert sum(bool(sample.correct) for sample in samples) == 64


def test_a_slow_problem_holds_up_no_other_and_results_come_as_they_finish(
    server: FakeServer, write_problems: Write
) -> None:
    _, samples = samples_of(server, write_problems("[wait]", *[""] * 49), parallel=2)
    others = list(islice(samples, 49))  # more than one block, with the first problem still unanswered
    assert all(sample.correct and "[wait]" not in sample.question for sample in others)
    server.release()
    assert [sample.question[:6] for sample in samples] == ["[wait]"]


def test_it_runs_where_no_cpu_is_free(server: FakeServer, write_problems: Write) -> None:
    @ray.remote
    class Replica:
        def ready(self) -> bool:
            return True

    free = ray.available_resources().get("CPU", 0.0)  # less than all where a model is served beside
    parts = [part for part in (int(free), round(free % 1, 4)) if part]
    replicas = [Replica.options(num_cpus=part).remote() for part in parts]
    assert all(ray.get([replica.ready.remote() for replica in replicas]))
    code, summary, _ = evaluate(server, write_problems(*[""] * 5), "--samples", "4", "--mode", "no-tools")
    for replica in replicas:
        ray.kill(replica)
    assert (code, summary["counts"]["samples"]) == (0, 4)
