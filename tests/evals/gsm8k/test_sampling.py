"""Several answers to each problem, runs that are extended or steered, and runs that end because too much fails."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer

from evals.gsm8k.__main__ import main

Write = Callable[..., Path]
TRUTH = {
    "id": "1",
    "model": "fake/model",
    "kind": "linear",
    "point": "layers.1.output",
    "labels": ["true"],
    "values": 1,
}

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def evaluate(server: FakeServer, tmp_path: Path) -> Callable[..., int]:
    def run(dataset: Path, *options: str) -> int:
        where = ["--base-url", server.base_url, "--dataset", str(dataset), "--results-dir", str(tmp_path / "results")]
        return main([*where, "--mode", "no-tools", *options])

    return run


def read(directory: Path, name: str) -> Any:
    return json.loads((directory / "results" / name).read_text())


def test_a_run_is_extended_by_problems_and_epochs(
    server: FakeServer,
    write_problems: Write,
    evaluate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dataset = write_problems("", "[wrong]", "", "[wrong]")
    assert evaluate(dataset, "--samples", "2", "--epochs", "2") == 0
    assert "--epochs 2: at temperature 0 the answers to a problem are the same" in capsys.readouterr().err
    assert read(tmp_path, "summary.json")["counts"] == {
        "problems": 2,
        "conditions": 1,
        "samples": 4,
        "failed": 0,
        "missing": 0,
    }
    assert evaluate(dataset, "--resume", "--samples", "4", "--epochs", "3") == 0
    assert len(server.requests) == 12
    found = read(tmp_path, "summary.json")
    assert (found["counts"]["problems"], found["counts"]["samples"]) == (4, 12)
    condition = found["conditions"]["no-tools.control"]
    assert (condition["normalized"]["correct"], condition["normalized"]["of"]) == (6, 12)
    assert condition["epochs"]["pass_at"] == {"1": 0.5, "2": 0.5, "3": 0.5}
    assert condition["epochs"]["majority"]["accuracy"] == 0.5
    page = (tmp_path / "results" / "report.html").read_text()
    assert "Several answers to each problem" in page
    assert evaluate(dataset, "--resume", "--samples", "2") == 2


def test_each_layer_and_scale_of_a_sweep_is_paired_to_none(
    server: FakeServer,
    write_problems: Write,
    evaluate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "calm.json"
    file.write_text('[{"op": "add", "point": "layers.{layer}.output", "vector": "calm"}]')
    told = ["--interventions", str(file), "--sweep", "scale=-4,0,4", "layer=1,2"]
    assert evaluate(write_problems("", "[wrong]"), *told) == 0
    steered = [body["interventions"][0] for body in server.requests if "interventions" in body]
    assert {(one["point"], one["scale"]) for one in steered} == {
        (f"layers.{layer}.output", scale) for layer in (1, 2) for scale in (-4.0, 4.0)
    }
    assert len(server.requests) == 10
    (sweep,) = read(tmp_path, "summary.json")["sweep"]
    assert sweep["scales"] == [-4.0, 0.0, 4.0]
    assert [[cell["accuracy"] for cell in row["cells"]] for row in sweep["rows"]] == [[0.5] * 3] * 2
    assert sweep["rows"][0]["cells"][0]["difference"] == 0.0
    assert sweep["rows"][0]["cells"][1]["difference"] is None
    assert "Steering by layer and scale" in (tmp_path / "results" / "report.html").read_text()
    said = capsys.readouterr().out
    assert "layer 2   50.0%  +0.0      50.0%    50.0%  +0.0" in said
    assert "control_layer2" not in said  # a row for each cell would hide the variants
    file.write_text('[{"op": "add", "point": "layers.{layer}.output", "vector": "anger"}]')
    assert evaluate(write_problems("", "[wrong]"), "--resume", *told) == 2


def test_interventions_that_the_server_refuses_stop_a_run_before_the_first_sample(
    server: FakeServer,
    write_problems: Write,
    evaluate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.told = {"versions": {"vitrine": "0.1.0"}}
    server.refuses = {"interventions": "interventions[0].vector"}
    file = tmp_path / "calm.json"
    file.write_text('[{"op": "add", "point": "layers.{layer}.output", "vector": "calm"}]')
    dataset = write_problems("", "")
    assert evaluate(dataset, "--interventions", str(file), "--sweep", "scale=-4,4", "layer=1,2") == 2
    assert "--interventions at layer 1: interventions[0].vector: not with" in capsys.readouterr().err
    assert [body["max_tokens"] for body in server.requests] == [1]
    server.refuses = {}
    assert evaluate(dataset, "--interventions", str(file), "--sweep", "scale=-4,4", "layer=1,2") == 0
    assert [body["interventions"][0]["point"] for body in server.requests if body["max_tokens"] == 1] == [
        f"layers.{layer}.output" for layer in (1, 1, 2)
    ]


def test_a_preset_that_becomes_the_default_stops_a_resume(
    server: FakeServer, write_problems: Write, evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = write_problems("", "")
    server.presets = []
    assert evaluate(dataset, "--samples", "1") == 0
    server.presets = [{"name": "calm", "model": "fake/model", "default": True}]
    assert evaluate(dataset, "--resume", "--samples", "2") == 2
    assert "was made with different interventions" in capsys.readouterr().err


def test_a_default_that_is_replaced_under_its_name_is_seen(
    server: FakeServer, write_problems: Write, evaluate: Callable[..., int], tmp_path: Path
) -> None:
    first = {"name": "calm", "model": "fake/model", "default": True, "created": 1.0}
    server.presets, server.presets_after = [first], (1, [first | {"created": 2.0}])
    assert evaluate(write_problems("")) == 1
    assert "preset was changed meanwhile" in read(tmp_path, "summary.json")["incomplete"]
    assert read(tmp_path, "config.json")["interventions"]["default"]["created"] == 1.0


def test_another_readout_under_the_name_of_a_gates_stops_a_resume(
    server: FakeServer,
    write_problems: Write,
    evaluate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.readouts = {"truth": TRUTH}
    file = tmp_path / "gated.json"
    gate = {"all": [{"readout": "truth", "above": 1.0}]}
    file.write_text(json.dumps([{"op": "zero", "point": "layers.1.output", "when": gate}]))
    dataset = write_problems("", "")
    assert evaluate(dataset, "--interventions", str(file), "--samples", "1") == 0
    server.readouts = {"truth": TRUTH | {"id": "2"}}
    assert evaluate(dataset, "--resume", "--samples", "2") == 2
    assert "was made with different interventions.readouts" in capsys.readouterr().err


def test_readouts_are_asked_kept_and_compared_with_the_outcome(
    server: FakeServer,
    write_problems: Write,
    evaluate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dataset = write_problems(*["", "[wrong]"] * 10)
    assert evaluate(dataset, "--readouts", "truth", "--mode", "both") == 2
    assert "GET /v1/readouts lists" in capsys.readouterr().err
    assert not server.requests
    server.readouts = {"truth": TRUTH}
    assert evaluate(dataset, "--readouts", "truth", "--mode", "both") == 0
    assert all(body["readouts"] == [{"name": "truth", "tokens": "generated"}] for body in server.requests)
    assert "AUROC of readouts against the outcome" in capsys.readouterr().out
    found = read(tmp_path, "summary.json")["readouts"]
    plain, tools = found["auroc"]
    assert (plain["mode"], plain["readout"], plain["label"]) == ("no-tools", "truth", None)
    assert plain["mean"] | {"ci95": None} == {"samples": 20, "correct": 10, "auroc": 1.0, "ci95": None, "why_not": None}
    assert 0.5 < plain["mean"]["ci95"][0] < plain["mean"]["ci95"][1] == 1.0
    assert found["tokens"][0]["tokens"] == 5 * 20 + 5 * 40  # of each turn
    assert tools["last"]["samples"] == 20
    sample = json.loads(next((tmp_path / "results" / "samples").glob("*.with-tools.*")).read_text())
    assert [turn["readouts"]["tokens"] for turn in sample["turns"]] == [list("abcde")] * 2
    server.readouts["other"] = TRUTH
    assert evaluate(dataset, "--mode", "both", "--resume", "--readouts", "truth,other") == 2
    assert "was made with different readouts" in capsys.readouterr().err
    server.readouts["truth"] = TRUTH | {"id": "2"}
    assert evaluate(dataset, "--mode", "both", "--resume") == 2
    assert "was made with different server.readouts" in capsys.readouterr().err


def test_readouts_of_more_numbers_than_an_answer_may_have_are_refused_before_the_first_sample(
    server: FakeServer, write_problems: Write, evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.readouts = {"truth": TRUTH, "moods": TRUTH | {"values": 9999}}
    dataset = write_problems("")
    assert evaluate(dataset, "--readouts", "truth,moods", "--max-tokens", "21") == 2
    assert "are 210000 numbers, and an answer may have 200000" in (said := capsys.readouterr().err)
    assert "or lower --max-tokens to 20" in said
    assert not server.requests
    assert evaluate(dataset, "--readouts", "truth,moods", "--max-tokens", "20") == 0


def test_a_run_ends_once_too_many_samples_failed(
    server: FakeServer, write_problems: Write, evaluate: Callable[..., int], tmp_path: Path
) -> None:
    assert evaluate(write_problems(*["[refused]"] * 3, *[""] * 3), "--max-failures", "0", "--parallel", "1") == 1
    assert "--max-failures is 0" in read(tmp_path, "summary.json")["incomplete"]


def test_failures_of_both_modes_count_together(
    server: FakeServer, write_problems: Write, evaluate: Callable[..., int], tmp_path: Path
) -> None:
    told = ["--mode", "both", "--max-failures", "2", "--parallel", "1"]
    assert evaluate(write_problems("[refused]", "[refused]", ""), *told) == 1
    assert read(tmp_path, "summary.json")["incomplete"].startswith("3 samples failed")


def test_tools_that_the_template_does_not_know_are_refused_before_the_first_sample(
    server: FakeServer,
    write_problems: Write,
    evaluate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.told = {"versions": {"vitrine": "0.1.0"}}
    server.refuses = {"tools": "tools"}
    dataset = write_problems("")
    assert evaluate(dataset, "--mode", "with-tools") == 2
    assert "--tools text offers the calculator in plain text" in capsys.readouterr().err
    assert evaluate(dataset, "--mode", "with-tools", "--tools", "text") == 0
    assert "offered in plain text (--tools text)" in capsys.readouterr().out
    assert "offered in plain text" in (page := (tmp_path / "results" / "report.html").read_text())
    assert "write &lt;calculator&gt;12 * 3&lt;/calculator&gt; and stop" in page.partition("config.json</code>")[0]


def test_answers_are_drawn_as_the_models_publisher_draws_them(
    server: FakeServer, write_problems: Write, evaluate: Callable[..., int], tmp_path: Path
) -> None:
    server.told = {"generation_config": {"temperature": 0.6, "top_p": 0.95, "top_k": 20}}
    assert evaluate(write_problems("")) == 0
    (body,) = server.requests
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.6, 0.95, 20)
    assert read(tmp_path, "config.json")["config"]["temperature"] == 0.6
