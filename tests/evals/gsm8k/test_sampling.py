"""Several answers to each problem, and evaluations that are extended or steered."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer

from evals.gsm8k.__main__ import main

Write = Callable[..., Path]
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


def test_tools_that_the_template_does_not_know_are_refused_before_the_first_sample(
    server: FakeServer, write_problems: Write, evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.told = {"versions": {"vitrine": "0.1.0"}}
    server.refuses = {"tools": "tools"}
    dataset = write_problems("")
    assert evaluate(dataset, "--mode", "with-tools") == 2
    assert "choose --mode no-tools" in capsys.readouterr().err
    assert evaluate(dataset) == 0


def test_answers_are_drawn_as_the_models_publisher_draws_them(
    server: FakeServer, write_problems: Write, evaluate: Callable[..., int], tmp_path: Path
) -> None:
    server.told = {"generation_config": {"temperature": 0.6, "top_p": 0.95, "top_k": 20}}
    assert evaluate(write_problems("")) == 0
    (body,) = server.requests
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.6, 0.95, 20)
    assert read(tmp_path, "config.json")["config"]["temperature"] == 0.6


def test_fields_that_a_file_adds_to_requests_are_sent_and_readouts_are_kept(
    server: FakeServer,
    write_problems: Write,
    evaluate: Callable[..., int],
    further: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    asked = {"readouts": [{"name": "truth", "tokens": "generated"}], "top_p": 0.9}
    assert evaluate(write_problems(""), *further(extra_body=asked, system="Be brief.")) == 0
    (body,) = server.requests
    assert body | asked == body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    (path,) = (tmp_path / "results" / "samples").iterdir()
    (turn,) = json.loads(path.read_text())["turns"]
    assert len(turn["readouts"]["truth"]["generated"]["values"]) == 5
