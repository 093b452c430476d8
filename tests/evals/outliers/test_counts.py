"""Both censuses are those of plain loops over the same rows, whatever batches the rows come in."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evals.outliers import features, massive
from evals.outliers.counts import Counts
from evals.outliers.stored import Stored

Runs = dict[str, dict[str, torch.Tensor]]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WIDTH = 5
AT_EDGES = [0.0, 0.1, 0.125, 1.0, 5.96875, 6.0, 6.0625, 6.125, 100.0, 100.5, 101.0, 125.0, 1000.0]
BROKEN = [float("nan"), float("inf")]


@st.composite
def sessions(draw: Any, points: list[str]) -> Runs:
    """Runs of 1 to 7 tokens; most values are small, and others are on both sides of every threshold."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    share, odd = draw(st.sampled_from([0.01, 0.1, 0.5])), draw(st.sampled_from([0.0, 0.0, 0.01]))
    found: Runs = {}
    for run in range(draw(st.integers(1, 6))):
        found[f"run-{run}"] = {}
        tokens = draw(st.integers(1, 7))
        for point in points:
            values = random.choice([0.1, 0.125], (tokens, WIDTH))
            values = np.where(random.random(values.shape) < share, random.choice(AT_EDGES, values.shape), values)
            values = np.where(random.random(values.shape) < odd, random.choice(BROKEN, values.shape), values)
            values *= random.choice([-1, 1], values.shape)
            found[f"run-{run}"][point] = torch.from_numpy(values).to(dtype)
    return found


def finite(runs: Runs) -> dict[str, list[tuple[int, dict[str, np.ndarray]]]]:
    """Of each run the positions and values, float64 by point, of tokens all of whose values are finite."""
    return {
        run: [
            (token, {name: of[token].double().numpy() for name, of in points.items()})
            for token in range(len(next(iter(points.values()))))
            if all(bool(of[token].isfinite().all()) for of in points.values())
        ]
        for run, points in runs.items()
    }


def counted(tokens: dict[str, list[Any]], large: Callable[[str, str, float], bool]) -> list[dict[str, Any]]:
    """Each feature's layers, positions, largest value and where it first is, by loops as plain as can be."""
    found = []
    for feature in range(WIDTH):
        layers, positions, most, where = set(), set(), 0.0, None
        for run, rows in tokens.items():
            for token, points in rows:
                for point, values in points.items():
                    value = float(values[feature])
                    if large(run, point, value):
                        layers.add(int(point.split(".")[1]))
                        positions.add((run, token))
        for point in sorted({point for rows in tokens.values() for _, points in rows for point in points}):
            for run, rows in tokens.items():
                for token, points in rows:
                    value = float(points[point][feature])
                    if large(run, point, value) and abs(value) > most:
                        most, where = abs(value), (point, run, token)
        found.append({"layers": sorted(layers), "positions": len(positions), "largest": most, "where": where})
    return found


def compare(counts: Counts, want: list[dict[str, Any]], tokens: dict[str, list[Any]]) -> None:
    assert counts.rows == sum(map(len, tokens.values()))
    assert counts.positions.tolist() == [one["positions"] for one in want]
    for one in counts.records(np.flatnonzero(counts.positions)):
        wanted = want[one["feature"]]
        where = one["where"]
        assert one["layers"] == wanted["layers"]
        assert one["largest"] == wanted["largest"]
        assert (where["point"], where["run_id"], where["position"]) == wanted["where"]
        assert where["token_id"] == where["position"] + 100
        assert one["positions"] == wanted["positions"] / counts.rows


def stored(record: Callable[..., None], runs: Runs, rows: int) -> Stored:
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), runs)
        found = Stored(
            folder, "s", ["layers.*.*.output"] if "mlp" in next(iter(runs["run-0"])) else ["layers.*.output"]
        )
    found.most = rows
    return found


quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
INPUTS = [f"layers.{layer}.{site}.output" for layer in range(3) for site in ("mlp", "norm")]


@quick
@given(
    runs=sessions(INPUTS),
    rows=st.integers(1, 9),
    layers=st.sampled_from([0.25, 1 / 3, 0.5, 2 / 3, 1.0]),
    positions=st.sampled_from([0.06, 0.1, 0.25, 0.5, 1.0]),
)
def test_outlier_features_are_those_of_plain_loops(
    runs: Runs, rows: int, layers: float, positions: float, record: Callable[..., None]
) -> None:
    tokens = finite(runs)
    counts = features.count(stored(record, runs, rows), 6.0)
    want = counted(tokens, lambda _, __, value: abs(value) >= 6.0)
    compare(counts, want, tokens)
    assert counts.not_finite == sum(len(of["layers.0.mlp.output"]) for of in runs.values()) - counts.rows
    if counts.rows:
        outliers = features.outliers(counts, features.Rule(6.0, layers, positions)).tolist()
        assert outliers == [
            feature
            for feature, one in enumerate(want)
            if len(one["layers"]) / 3 >= layers and one["positions"] / counts.rows >= positions
        ]


@quick
@given(runs=sessions([f"layers.{layer}.output" for layer in range(3)]), rows=st.integers(1, 9))
def test_massive_activations_are_those_of_plain_loops(runs: Runs, rows: int, record: Callable[..., None]) -> None:
    tokens = finite(runs)

    def median(run: str, point: str) -> float:
        state = torch.from_numpy(np.array([points[point] for _, points in tokens[run]])).abs().flatten()
        cut = state.float().view(torch.int32) >> 16 << 16  # to bfloat16, towards 0
        return float(cut.view(torch.float32).median())  # torch's is the lower of two

    def large(run: str, point: str, value: float) -> bool:
        return abs(value) > 100 and abs(value) >= 1000 * median(run, point)

    counts = massive.count(stored(record, runs, rows), massive.Rule())
    compare(counts, counted(tokens, large), tokens)
    for one in counts.records(
        np.flatnonzero(counts.positions), lambda point, feature: {"median": counts.beside[point, feature]}
    ):
        assert one["median"] == median(one["where"]["run_id"], one["where"]["point"])


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_a_threshold_between_two_values_of_a_dtype_is_not_rounded(
    tmp_path: Path, record: Callable[..., None], dtype: torch.dtype
) -> None:
    values = torch.tensor([[6.09375, -6.125, 6.0, 0.0, 0.0]]).to(dtype)
    record(tmp_path, {"run-0": {"layers.0.mlp.output": values}})
    counts = features.count(Stored(tmp_path, "s", ["layers.*.mlp.output"]), 6.1)
    assert counts.positions.tolist() == [0, 1, 0, 0, 0]
