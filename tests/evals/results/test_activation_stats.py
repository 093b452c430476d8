"""Statistics are those of the stored values, by layer and outcome; what cannot be read is said."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from stored import SESSION, Points, Store, points

from deployments.points.patterns import Patterns
from evals.results.activation_stats import sites, write_stats
from evals.results.transfer import transfer

POINT = "layers.2.input_layernorm.output"


def samples(directory: Path, runs: list[tuple[str, bool | None, list[str]]]) -> None:
    """A samples.parquet with the columns that say which runs there are."""
    directory.mkdir(exist_ok=True)
    rows = [
        {"run_ids": [run_id], "session_id": SESSION, "correct": correct, "activation_uris": uris} | condition
        for run_id, correct, uris in runs
        for mode, _, variant in [run_id.partition("@")[2].partition("/")]
        for condition in [{"mode": mode or "no-tools", "variant": variant or "control"}]
    ]
    texts = pa.list_(pa.string())
    kinds = {"run_ids": texts, "session_id": pa.string(), "correct": pa.bool_(), "activation_uris": texts}
    kinds |= dict.fromkeys(("mode", "variant"), pa.string())
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(kinds)), directory / "samples.parquet")


def recorded(store: Store, directory: Path, values: Mapping[str, tuple[bool | None, Points]]) -> None:
    metas = {run_id: store.record(run_id, tensors) for run_id, (_, tensors) in values.items()}
    uris = {run_id: [at["uri"] for at in meta["runs"][0]["points"].values()] for run_id, meta in metas.items()}
    samples(directory, [(run_id, correct, uris[run_id][:1]) for run_id, (correct, _) in values.items()])


def read(directory: Path, **options: Any) -> dict[str, Any]:
    path = write_stats(directory, **options)
    assert path
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_they_are_the_stored_values_own(tmp_path: Path) -> None:
    values = {f"r{i}": (i % 2 == 0, points(i, 3 + i)) for i in range(6)}
    # Of another mode and variant, and steered: right answers are not compared with them.
    values |= {f"r6@{at}": (True, points(6, 9)) for at in ("with-tools", "no-tools/anger", "no-tools/control_layer8")}
    with Store(tmp_path / "store") as store:
        recorded(store, tmp_path / "results", values)
    found = read(tmp_path / "results")
    assert (found["why_not"], found["of_runs"], found["runs"], found["sampled"]) == (None, 9, 9, False)
    for name, of in found["points"].items():
        for group, wanted in {"correct": True, "other": False}.items():
            answers = [tensors[name][-2:] for right, tensors in [*values.values()][:6] if right == wanted]
            rows = torch.cat(answers).double()  # the prompt's last token, and the only one that was generated
            norms = rows.norm(dim=1)
            got = of["by_outcome"][group]
            assert (got["runs"], got["tokens"], got["not_finite"]) == (3, len(rows), 0)
            assert got["mean_norm"] == pytest.approx(norms.mean().item(), rel=1e-6)
            assert got["std_norm"] == pytest.approx(norms.std(unbiased=False).item(), rel=1e-5)
            assert got["mean"] == pytest.approx(rows.mean().item(), rel=1e-5, abs=1e-7)
            assert got["std"] == pytest.approx(rows.std(unbiased=False).item(), rel=1e-6)
            assert got["absmax"] == rows.abs().max().item()
        assert (of["runs"], of["tokens"]) == (9, sum(len(tensors[name]) for _, tensors in values.values()))
    assert (found["by_outcome"]["mode"], found["by_outcome"]["variant"]) == ("no-tools", "control")
    by_site = sites(found["points"])
    assert {site: [point["layer"] for point in each] for site, each in by_site.items()} == {
        "input_layernorm.output": [0, 2, 4],
        "post_attention_layernorm.output": [0, 2, 4],
    }


def test_of_many_runs_a_seeded_sample_is_read_and_that_is_said(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        recorded(store, tmp_path / "results", {f"r{i}": (True, points(i, 2)) for i in range(9)})
    found = read(tmp_path / "results", most_runs=4)
    assert (found["of_runs"], found["runs"], found["sampled"]) == (9, 4, True)
    assert found == read(tmp_path / "results", most_runs=4)
    assert found["points"] != read(tmp_path / "results", most_runs=4, seed=1)["points"]


def test_runs_that_are_elsewhere_are_counted_and_failed_samples_are_not_compared(tmp_path: Path) -> None:
    outcomes = {"r0": True, "r1": False, "r2": None, "r3": None}
    with Store(tmp_path / "store") as store:
        metas = {run_id: store.record(run_id, points(1, 4)) for run_id in outcomes}
        store.record("r4", points(1, 4), session="another")
    uri = next(iter(metas["r0"]["runs"][0]["points"].values()))["uri"]
    samples(tmp_path / "results", [(run_id, correct, [uri]) for run_id, correct in (outcomes | {"r4": True}).items()])
    found = read(tmp_path / "results")
    assert (found["of_runs"], found["runs"], found["lacking"], found["sampled"]) == (5, 4, 1, False)
    assert (found["by_outcome"]["of_runs"], found["by_outcome"]["runs"]) == (3, 2)
    for of in found["points"].values():
        assert [of["by_outcome"][group]["runs"] for group in ("correct", "other")] == [1, 1]


def test_right_answers_and_others_are_sampled_within_their_condition(tmp_path: Path) -> None:
    values = {f"r{i}": (i % 2 == 0, points(i, 2)) for i in range(6)}
    values |= {f"r{i}@no-tools/control_scale{i}": (True, points(i, 2)) for i in range(60)}
    with Store(tmp_path / "store") as store:
        recorded(store, tmp_path / "results", values)
    found = read(tmp_path / "results", most_runs=6)
    assert (found["runs"], found["by_outcome"]["runs"], found["by_outcome"]["of_runs"]) == (6, 6, 6)
    for of in found["points"].values():
        assert (of["runs"], [of["by_outcome"][group]["runs"] for group in ("correct", "other")]) == (6, [3, 3])


def test_transferred_files_come_before_the_stores_own(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        recorded(store, tmp_path / "results", {"r1": (True, points(1, 4))})
        transfer(tmp_path / "results", store.base_url, SESSION)
    assert read(tmp_path / "results")["source"] == str(tmp_path / "results" / "activations" / SESSION)


def test_values_that_are_not_finite_are_counted_apart(tmp_path: Path) -> None:
    values = torch.tensor([[3.0, 4.0], [float("nan"), 1.0], [float("inf"), 1.0]])
    with Store(tmp_path / "store") as store:
        recorded(store, tmp_path / "results", {"r1": (None, {POINT: values})})
    point = read(tmp_path / "results")["points"][POINT]
    assert (point["tokens"], point["mean_norm"], point["absmax"], point["not_finite"]) == (1, 5.0, 4.0, 2)
    assert point["by_outcome"]["correct"]["mean_norm"] is None


def test_attention_patterns_have_no_statistics_and_leave_those_of_the_other_points(tmp_path: Path) -> None:
    patterns = {"layers.2.attention.weights": Patterns(torch.ones(20), 2, range(4))}
    with Store(tmp_path / "store") as store:
        recorded(store, tmp_path / "both", {"r1": (True, points(1, 4) | patterns)})
        recorded(store, tmp_path / "alone", {"r2": (True, patterns)})
    found = read(tmp_path / "both")
    assert (found["why_not"], list(found["points"])) == (None, list(points(1, 4)))
    assert {of["tokens"] for of in found["points"].values()} == {4}
    alone = read(tmp_path / "alone")
    assert (alone["points"], alone["why_not"]) == ({}, "only attention patterns were recorded, which have no norm")


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("file:///nowhere/evaluated/000001.arrow", "file:///nowhere/evaluated cannot be read from this machine"),
        ("s3://bucket/evaluated/000001.arrow", "s3://bucket/evaluated cannot be read from this machine"),
    ],
)
def test_files_that_are_elsewhere_are_the_reason_why_there_is_nothing(tmp_path: Path, uri: str, reason: str) -> None:
    samples(tmp_path / "results", [("r1", True, [uri])])
    found = read(tmp_path / "results")
    assert found["points"] == {}
    assert reason in found["why_not"]


def test_a_directory_of_other_runs_is_the_reason_why_there_is_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        recorded(store, tmp_path / "results", {"r1": (True, points(1, 4))})
        uri = f"file://{tmp_path}/store/_/{SESSION}/x.arrow"
    samples(tmp_path / "results", [("another", True, [uri])])
    assert "has none of the samples' runs" in read(tmp_path / "results")["why_not"]


def test_a_run_without_activations_has_no_statistics(tmp_path: Path) -> None:
    samples(tmp_path / "results", [("r1", True, [])])
    assert write_stats(tmp_path / "results") is None
