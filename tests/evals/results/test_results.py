"""The files of a run, as those who read them find them."""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fake_openai import FakeServer
from made import make_results

from evals.config import Config, EvalError
from evals.gsm8k.__main__ import main
from evals.gsm8k.summary import conclude, summarize
from evals.results.provenance import facts
from evals.results.results import read_samples
from evals.results.tally import ActivationTally, ConditionTally
from evals.task.trajectory import Sample, Turn

Write = Callable[..., Path]
LABELS = ("", "[wrong]", "[invalid]", "[cut]", "[loop]", "[refused]")


@pytest.fixture
def results(
    server: FakeServer, cluster: Any, write_problems: Write, further: Callable[..., list[str]], tmp_path: Path
) -> Path:
    """A run with every outcome in it."""
    directory = tmp_path / "results"
    argv = ["--base-url", server.base_url, "--dataset", str(write_problems(*LABELS)), "--results-dir", str(directory)]
    argv += ["--variants", "control,calm", "--collect-activations"]
    assert main([*argv, *further(rewards={"correctness": 1, "format": 0.5})]) == 1
    return directory


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_docstrings_describe_every_field(results: Path) -> None:
    summary = read(results / "summary.json")
    fields: dict[Any, Any] = {model: model.model_fields for model in (Config, Sample, Turn)}
    fields |= {
        facts: read(results / "config.json"),
        summarize: summary,
        ActivationTally.summary: summary["activations"],
    }
    fields[ConditionTally.summary] = summary["conditions"]["no-tools.calm"]
    for described, names in fields.items():
        text = re.split("(?:Attributes|Returns):\n", inspect.getdoc(described) or "")[1]
        assert re.findall(r"^    (\w+): ", text.partition("\n\n")[0], re.MULTILINE) == [*names], described


def test_all_files_of_a_run_tell_the_same(results: Path) -> None:
    names = {path.name.removesuffix(".json") for path in (results / "samples").iterdir()}
    assert names == {path.name.removesuffix(".jsonl") for path in (results / "trajectories").iterdir()}
    assert names == {path.name.removesuffix(".json") for path in (results / "agent_states").iterdir()}
    rows = [json.loads(line) for line in (results / "dataset.jsonl").read_text().splitlines()]
    table = pq.read_table(results / "samples.parquet").to_pylist()
    assert {f"{row['id']}.{row['mode']}.{row['variant']}" for row in rows} == names
    assert len(names) == len(LABELS) * 4
    for row, cells in zip(rows, table, strict=True):
        key = f"{row['id']}.{row['mode']}.{row['variant']}"
        sample, state = read(results / "samples" / f"{key}.json"), read(results / "agent_states" / f"{key}.json")
        steps = [json.loads(line) for line in (results / "trajectories" / f"{key}.jsonl").read_text().splitlines()]
        assert [step["content"] for step in steps] == [message["content"] for message in sample["messages"]]
        assert sample["outcome"] == row["outcome"] == state["status"] == cells["outcome"]
        assert sample["reward"] == row["reward"] == state["reward"] == cells["reward"]
        assert cells["reward_format"] == sample["rewards"].get("format")
        assert row["run_ids"] == state["run_ids"] == cells["run_ids"]
        assert row["run_ids"] == [run for step in steps for run in step.get("run_ids", [])]
        assert len(sample["turns"]) == row["turns"] == state["turns"] == cells["turns"]
        assert row["tool_calls"] == len(state["tool_calls"]) == cells["tool_calls"]
        assert cells["completion_tokens"] == sum(turn["completion_tokens"] for turn in sample["turns"])


def test_a_trajectory_has_what_each_step_cost_and_what_the_tool_said(results: Path) -> None:
    path = next(
        path for path in (results / "trajectories").glob("*.with-tools.calm.jsonl") if "[loop]" in path.read_text()
    )
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert [step["role"] for step in steps] == ["user", *["assistant", "tool"] * 12]
    assert [step["step"] for step in steps] == [*range(25)]
    assert steps[1]["tool_calls"][0]["function"]["name"] == "calculator"
    assert (steps[1]["completion_tokens"], steps[1]["finish_reason"], len(steps[1]["run_ids"])) == (5, "tool_calls", 1)
    assert (steps[2]["error"], steps[2]["content"]) == (False, "1004")


def test_all_follows_from_the_configuration_and_the_samples(results: Path) -> None:
    assert summarize(results, None) == json.loads((results / "summary.json").read_text())
    before = {path: path.read_bytes() for path in results.rglob("*.*") if path.is_file() and path.suffix != ".html"}
    for path in before:
        if path.parent.name != "samples" and path.name != "config.json":
            path.unlink()
    conclude(results, None)
    assert {path: path.read_bytes() for path in before} == before


def late(directory: Path) -> Path:
    """Makes the first question of a made run one whose answer did not come in time."""
    path = min((directory / "samples").iterdir())
    outcome = {"outcome": "timed_out", "correct": False, "finish_reason": "timeout", "latency_s": 300.0, "turns": []}
    path.write_text(json.dumps(read(path) | outcome))
    return path


def test_a_sample_file_that_is_empty_is_named(tmp_path: Path) -> None:
    directory = make_results(tmp_path / "run", 4, modes=("no-tools",), skill=1.0)
    path = min((directory / "samples").iterdir())
    path.write_bytes(b"")
    with pytest.raises(EvalError, match=rf"{path} cannot be read: Invalid JSON: EOF .*; delete it, and --resume asks"):
        list(read_samples(directory))


def test_a_sample_without_an_answer_has_no_part_in_latency(tmp_path: Path) -> None:
    directory = make_results(tmp_path / "run", 4, modes=("no-tools",), skill=1.0)
    path = late(directory)
    (condition,) = summarize(directory, None)["conditions"].values()
    assert (condition["timed_out"], condition["normalized"]["of"]) == (1, 4)
    path.unlink()
    (others,) = summarize(directory, None)["conditions"].values()
    assert condition["latency_s"] == others["latency_s"]
    assert condition["completion_tokens_per_sample"] == others["completion_tokens_per_sample"]


def test_a_run_without_a_sample_yet_has_all_its_files(tmp_path: Path) -> None:
    directory = make_results(tmp_path / "run", 2, modes=("no-tools",))
    for path in (directory / "samples").iterdir():
        path.unlink()
    summary = conclude(directory, None)
    assert (summary["counts"]["samples"], summary["counts"]["missing"]) == (0, 2)
    assert pq.read_table(directory / "samples.parquet").num_rows == 0
    assert (directory / "report.html").exists()


def test_in_a_heat_map_0_is_no_steering_only_where_it_changes_nothing(tmp_path: Path) -> None:
    add = {"op": "add", "point": "layers.1.output", "vector": "calm"}
    damp = {"op": "scale", "point": "layers.1.output", "factor": 0.5}
    for op, asked in ((add, 1), (damp, 2)):
        directory = make_results(tmp_path / op["op"], 20, interventions=(op,), sweep={"scale": (0.0, 2.0)})
        summary = json.loads((directory / "summary.json").read_text())
        assert summary["counts"]["conditions"] == 2 * (1 + asked)
        (of, _) = summary["sweep"]
        names = ["no-tools.control" if asked == 1 else "no-tools.control_scale0", "no-tools.control_scale2"]
        accuracies = [summary["conditions"][name]["normalized"]["accuracy"] for name in names]
        assert (of["scales"], [cell["accuracy"] for cell in of["rows"][0]["cells"]]) == ([0.0, 2.0], accuracies)
        assert (of["rows"][0]["cells"][0]["difference"] is None) == (asked == 1)
