"""The command finds the features that the rule names, as JSON and as a page; mistakes are one line and status 2."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evals.outliers.__main__ import main
from evals.outliers.census import Rule, census

WIDTH = 12
HOSTILE = "<i>"


def values(seed: int, tokens: int, spikes: dict[int, float]) -> torch.Tensor:
    """Normal values, and at all tokens but the last large ones at some features."""
    found = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).clamp(-5, 5)
    for feature, spike in spikes.items():
        found[: tokens - 1, feature] = spike
    return found.bfloat16()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, record: Callable[..., None]) -> Path:
    """Two runs with the outlier feature 9 from layer 1 on."""
    folder = tmp_path_factory.mktemp("store")
    runs = {
        f"run-{number}": {
            f"layers.{layer}.{site}": values(number, 5, {9: -12.0} if layer else {})
            for layer in range(6)
            for site in ("input_layernorm.output", "output")
        }
        for number in range(2)
    }
    runs["run-1"]["layers.3.output"][1, 4] = 90.0
    record(folder, runs, model="vitrine-demo", text=HOSTILE + "t01t02t03t04")
    return folder


def run(store: Path, out: Path, *more: str) -> dict[str, Any]:
    assert main(["--session", "s", "--store", str(store), "--out", str(out), *more]) == 0
    found: dict[str, Any] = json.loads((out / "outliers.json").read_text())
    return found


def test_it_writes_the_features_and_where_they_are(store: Path, tmp_path: Path, capsys: Any) -> None:
    found = run(store, tmp_path / "out")
    assert "outlier features: 1 of 12 (9)" in capsys.readouterr().out
    assert (found["model"], found["tokens"], found["runs"], found["width"]) == ("vitrine-demo", 10, 2, WIDTH)
    assert found["thresholds"] == {"magnitude": 6.0, "layers": 0.25, "positions": 0.06}
    (one,) = found["features"]
    assert (one["feature"], one["layers"], one["positions"], one["largest"]) == (9, [1, 2, 3, 4, 5], 0.8, 12.0)
    where = {"point": "layers.1.input_layernorm.output", "run_id": "run-0", "position": 0}
    assert one["where"] == where | {"token_id": 100, "token": HOSTILE}
    assert found["map"] == {"of": 1, "features": [9], "largest": [[None], *[[12.0]] * 5]}
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"<script|(?:src|href)\s*=", page)
    assert HOSTILE not in page
    assert "&lt;i&gt;" in page
    assert "feature 9, layer 1: 12" in page


def test_thresholds_and_points_are_options(store: Path, tmp_path: Path) -> None:
    for option in (["--positions", "0.81"], ["--layers", "0.9"], ["--magnitude", "12.5"]):
        assert not run(store, tmp_path / "a", *option)["features"]
    found = run(store, tmp_path / "b", "--points", "layers.1.*.output,layers.3.output")
    assert found["points"] == ["layers.1.input_layernorm.output", "layers.3.output"]
    assert [one["feature"] for one in found["features"]] == [9, 4]


def test_runs_and_tokens_that_are_left_out_are_counted(
    store: Path, tmp_path: Path, record: Callable[..., None]
) -> None:
    shutil.copytree(store, tmp_path / "store")
    broken = values(5, 4, {})
    broken[1, 0] = float("nan")
    record(
        tmp_path / "store",
        {"run-2": {f"layers.{layer}.input_layernorm.output": broken for layer in range(6)}},
        model="vitrine-demo",
    )
    found = run(tmp_path / "store", tmp_path / "out")
    assert (found["runs"], found["tokens"], found["tokens_not_finite"], found["runs_left_out"]) == (3, 13, 1, 0)
    found = run(tmp_path / "store", tmp_path / "out", "--points", "layers.*.output")
    assert (found["runs"], found["runs_left_out"], found["features"][0]["feature"]) == (2, 1, 9)


POINTS = [f"layers.{layer}.{site}.output" for layer in range(3) for site in ("mlp", "norm")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 32),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    rows=st.integers(1, 9),
    layers=st.sampled_from([0.25, 1 / 3, 0.5, 1.0]),
    positions=st.sampled_from([0.06, 0.25, 0.5]),
)
def test_outliers_are_those_of_plain_loops_whatever_batches_rows_come_in(
    seed: int, dtype: torch.dtype, rows: int, layers: float, positions: float, record: Callable[..., None]
) -> None:
    random = np.random.default_rng(seed)
    runs: dict[str, dict[str, torch.Tensor]] = {}
    for number in range(random.integers(1, 5)):
        shape = int(random.integers(1, 7)), 5
        runs[f"run-{number}"] = {
            point: torch.from_numpy(random.choice([0.0, 1.0, -5.9375, 6.0, -6.125, 100.0], shape)).to(dtype)
            for point in POINTS
        }
    tokens = [
        {point: of[point][token] for point in POINTS} for of in runs.values() for token in range(len(of[POINTS[0]]))
    ]
    expected = []
    for feature in range(5):
        large = [[point for point in POINTS if abs(float(token[point][feature])) >= 6.0] for token in tokens]
        found = {point.split(".")[1] for points in large for point in points}
        if len(found) / 3 >= layers and sum(map(bool, large)) / len(tokens) >= positions:
            most = max(abs(float(token[point][feature])) for token in tokens for point in POINTS)
            expected.append(
                (feature, [int(layer) for layer in sorted(found)], sum(map(bool, large)) / len(tokens), most)
            )
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        record(Path(folder), runs)
        patch.setattr("evals.outliers.census.BATCH_BYTES", rows * (8 + 5 * 6 * dtype.itemsize))
        got = census(folder, "s", ["layers.*.*.output"], Rule(6.0, layers, positions))
    assert (
        sorted((one["feature"], one["layers"], one["positions"], one["largest"]) for one in got["features"]) == expected
    )


def test_a_threshold_between_two_values_of_a_dtype_is_not_rounded(tmp_path: Path, record: Callable[..., None]) -> None:
    record(tmp_path, {"run-0": {"layers.0.mlp.input": torch.tensor([[6.09375, -6.125, 6.0]]).bfloat16()}})
    assert [one["feature"] for one in census(tmp_path, "s", rule=Rule(6.1))["features"]] == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--points", "layers.*.q_proj.input"],
            "--points, session s: layers.*.q_proj.input was not recorded; there is",
        ),
        (["--session", "other"], "no session 'other'"),
        (["--store", "/nowhere"], "there is no session 's' in /nowhere"),
    ],
)
def test_a_mistake_is_one_line(store: Path, tmp_path: Path, capsys: Any, options: list[str], message: str) -> None:
    assert main(["--session", "s", "--store", str(store), "--out", str(tmp_path), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("option", [["--layers", "1.5"], ["--magnitude", "0"], ["--magnitude", "nan"]])
def test_a_value_that_cannot_be_is_refused_by_its_option(option: list[str], tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--session", "s", "--out", str(tmp_path), *option])
    assert option[0] in capsys.readouterr().err


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
