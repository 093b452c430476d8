"""The command writes what it finds as JSON and as a page; mistakes are one line and status 2."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from scoring_server import ScoringServer

from deployments.activations.segments.columns import to_batch
from deployments.demo_model import WEIGHTS
from deployments.model.load import load
from evals.outliers.__main__ import main

WIDTH = 192
HOSTILE = "<i>"


def values(seed: int, tokens: int, spikes: dict[int, float]) -> torch.Tensor:
    """Normal values, and at the first tokens large ones at some features."""
    found = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).clamp(-5, 5)
    for feature, spike in spikes.items():
        found[: tokens - 1, feature] = spike
    return found.bfloat16()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, record: Callable[..., None]) -> Path:
    """Two runs of the model that ships: feature 9 is an outlier in layers 1 and 2; feature 4 is massive behind 2."""
    folder = tmp_path_factory.mktemp("store")
    runs = {
        f"run-{number}": {
            f"layers.{layer}.{site}": values(number, 5, {9: -12.0} if layer else {})
            for layer in range(6)
            for site in ("input_layernorm.output", "output")
        }
        for number in range(2)
    }
    runs["run-1"]["layers.2.output"][0, 4] = 3000.0
    record(folder, runs, model="vitrine-demo", text=HOSTILE + "t01t02t03t04")
    return folder


def run(store: Path, out: Path, *more: str) -> dict[str, Any]:
    assert main(["--session", "s", "--store", str(store), "--out", str(out), *more]) == 0
    found: dict[str, Any] = json.loads((out / "outliers.json").read_text())
    return found


def test_it_writes_features_massive_activations_and_where_they_are(store: Path, tmp_path: Path) -> None:
    found = run(store, tmp_path / "out")
    assert (found["model"], found["tokens"], found["runs"], found["width"]) == ("vitrine-demo", 10, 2, WIDTH)
    assert found["thresholds"] == {"magnitude": 6.0, "layers": 0.25, "positions": 0.06}
    (one,) = found["features"]
    assert (one["feature"], one["layers"], one["positions"], one["largest"]) == (9, [1, 2, 3, 4, 5], 0.8, 12.0)
    assert one["where"] == {
        "point": "layers.1.input_layernorm.output",
        "run_id": "run-0",
        "position": 0,
        "token_id": 100,
        "token": HOSTILE,
    }
    (massive,) = found["massive"]["features"]
    assert (massive["feature"], massive["layers"], massive["positions"]) == (4, [2], 0.1)
    assert (massive["largest"], massive["where"]["run_id"]) == (3008.0, "run-1")  # 3000 in bfloat16
    assert 0.5 < massive["median"] < 0.9
    assert found["map"]["features"] == [9]
    assert found["map"]["largest"] == [[None], *[[12.0]] * 5]
    assert found["ablation"] is None


def test_thresholds_and_points_are_options(store: Path, tmp_path: Path) -> None:
    assert not run(store, tmp_path / "a", "--positions", "0.81")["features"]
    assert not run(store, tmp_path / "b", "--layers", "0.9")["features"]
    assert not run(store, tmp_path / "c", "--magnitude", "12.5")["features"]
    found = run(store, tmp_path / "e", "--layers", "0", "--positions", "0")
    assert [one["feature"] for one in found["features"]] == [9]
    found = run(store, tmp_path / "d", "--points", "layers.1.*.output,layers.2.output", "--massive-magnitude", "4000")
    assert found["points"] == ["layers.1.input_layernorm.output", "layers.2.output"]
    assert [one["feature"] for one in found["features"]] == [9, 4]
    assert not found["massive"]["features"]


def test_the_page_loads_nothing_and_escapes_texts(store: Path, tmp_path: Path) -> None:
    run(store, tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"<script|(?:src|href)\s*=", text)
    assert "default-src 'none'" in text
    assert HOSTILE not in text
    assert "&lt;i&gt;" in text
    assert "feature 9, layer 1: 12" in text


def test_zeroing_is_measured_by_a_server_over_the_stored_runs(store: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with ScoringServer(load(str(WEIGHTS), dtype="float32", device="cpu")) as server:
        found = run(store, tmp_path / "out", "--ablate", "--base-url", server.base_url, "--seeds", "2")["ablation"]
    assert (found["features"], found["texts"], found["tokens"]) == ([9], 2, 8)
    assert found["points"] == [f"layers.{layer}.input_layernorm.output" for layer in range(6)]
    zeroed = [body.interventions for body in server.bodies if body.interventions]
    assert (len(server.bodies), len(zeroed)) == (8, 6)
    assert {len(each) for each in zeroed} == {6}
    assert "What zeroing outliers costs" in (tmp_path / "out" / "report.html").read_text()


def test_the_census_stays_where_no_server_answers(store: Path, tmp_path: Path, capsys: Any) -> None:
    with ScoringServer(load(str(WEIGHTS), dtype="float32", device="cpu")) as server:
        server.refusal = "no such model"
        options = ["--session", "s", "--store", str(store), "--out", str(tmp_path / "out")]
        assert main([*options, "--ablate", "--base-url", server.base_url]) == 2
    assert "no such model" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "outliers.json").read_text())["features"]


def test_runs_and_tokens_that_are_left_out_are_counted(
    store: Path, tmp_path: Path, record: Callable[..., None]
) -> None:
    shutil.copytree(store, tmp_path / "store")
    broken = values(5, 4, {})
    broken[1, 0] = float("nan")
    layers = {f"layers.{layer}.input_layernorm.output": broken for layer in range(6)}
    record(tmp_path / "store", {"run-2": layers | {"layers.0.output": broken}}, model="vitrine-demo")
    found = run(tmp_path / "store", tmp_path / "out")
    assert (found["runs"], found["tokens"], found["tokens_not_finite"]) == (3, 13, 1)
    assert (found["massive"]["runs"], found["massive"]["runs_left_out"]) == (2, 1)


def test_a_session_without_the_residual_stream_has_its_features_and_the_reason(
    tmp_path: Path, record: Callable[..., None]
) -> None:
    record(tmp_path, {"run-0": {"layers.0.mlp.input": values(1, 3, {2: 7.0})}})
    found = run(tmp_path, tmp_path / "out")
    assert [one["feature"] for one in found["features"]] == [2]
    assert found["features"][0]["where"]["token"] is None
    assert "layers.0.mlp.input" in found["massive"]["why_not"]
    assert found["massive"]["features"] == []


def test_a_residual_stream_without_a_finite_row_leaves_the_features(
    tmp_path: Path, record: Callable[..., None], capsys: Any
) -> None:
    points = {"layers.0.mlp.input": values(1, 3, {2: 7.0}), "layers.0.output": torch.full((3, WIDTH), float("nan"))}
    record(tmp_path, {"run-0": points})
    found = run(tmp_path, tmp_path / "out")
    assert [one["feature"] for one in found["features"]] == [2]
    assert found["massive"]["why_not"].startswith("--massive-points: none of 3 rows is finite at all 1 of layers.0.out")
    options = ["--session", "s", "--store", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*options, "--massive-points", "layers.0.output"]) == 2
    assert "--massive-points: none of 3 rows" in capsys.readouterr().err


def test_a_session_of_chosen_features_is_not_ablated(tmp_path: Path, record: Callable[..., None], capsys: Any) -> None:
    point = "layers.0.input_layernorm.output"
    record(tmp_path, {"run-0": {point: values(1, 3, {2: 7.0})[:, :8]}}, model="vitrine-demo")
    options = ["--session", "s", "--store", str(tmp_path), "--out", str(tmp_path / "out")]
    with ScoringServer(load(str(WEIGHTS), dtype="float32", device="cpu")) as server:
        assert main([*options, "--ablate", "--base-url", server.base_url]) == 2
        assert not server.bodies
    assert f"--ablate: 8 features of {point} were recorded, and the model has 192" in capsys.readouterr().err


def test_a_file_of_format_2_has_no_texts(
    tmp_path: Path, record: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_offsets(*args: Any, **options: Any) -> pa.RecordBatch:
        batch = to_batch(*args, **options)
        names = [name for name in batch.schema.names if name != "text_offset"]
        return batch.select(names)

    monkeypatch.setitem(record.__globals__, "to_batch", without_offsets)
    record(tmp_path, {"run-0": {"layers.0.mlp.input": values(1, 3, {2: 7.0})}})
    (one,) = run(tmp_path, tmp_path / "out")["features"]
    assert (one["feature"], one["where"]["token"]) == (2, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--points", "layers.*.q_proj.input"],
            "--points, session s: layers.*.q_proj.input was not recorded; there is layers.",
        ),
        (["--session", "other"], "no session 'other'"),
        (["--store", "/nowhere"], "there is no session 's' in /nowhere"),
        (
            ["--massive-points", "layers.9.output"],
            "--massive-points, session s: layers.9.output was not recorded; there is layers.",
        ),
    ],
)
def test_a_mistake_is_one_line(store: Path, tmp_path: Path, capsys: Any, options: list[str], message: str) -> None:
    assert main(["--session", "s", "--store", str(store), "--out", str(tmp_path), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "option",
    [["--layers", "1.5"], ["--magnitude", "0"], ["--magnitude", "nan"], ["--texts", "x"], ["--ablate", "--seeds", "1"]],
)
def test_a_value_that_cannot_be_is_refused_by_its_option(option: list[str], tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--session", "s", "--out", str(tmp_path), *option])
    assert ended.value.code == 2
    assert option[-2 if len(option) == 2 else 1] in capsys.readouterr().err


def test_runs_that_do_not_fit_one_census_are_refused(tmp_path: Path, record: Callable[..., None], capsys: Any) -> None:
    point = "layers.0.mlp.input"

    def error() -> str:
        assert main(["--session", "s", "--store", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
        return str(capsys.readouterr().err)

    record(tmp_path, {"run-0": {point: torch.full((2, 4), float("inf"))}})
    assert "none of 2 rows is finite" in error()
    record(tmp_path, {"run-1": {"layers.1.mlp.input": torch.ones(2, 4)}})
    assert "no run recorded all 2 of" in error()
    record(tmp_path, {"run-2": {point: torch.ones(2, 4)}}, model="another")
    assert "runs of another, model" in error()
