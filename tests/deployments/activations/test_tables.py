"""Stored runs as tables for pandas, Polars, DuckDB and Ray Data."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pytest
import torch
from storing import store as stored

from deployments.activations import read_run
from deployments.activations.reader.row_index import index_rows
from deployments.activations.reader.sources import segments
from deployments.activations.reader.tables import runs_table, table
from deployments.errors import RequestError
from deployments.points.names import COLUMNS
from deployments.points.patterns import Patterns
from vitrine.runs.rows import of_files

POINT, HEADS, WEIGHTS = "layers.1.output", "layers.1.attention.heads", "layers.1.attention.weights"


@pytest.fixture(scope="module")
def made(make):
    """Twelve runs with a hidden state, heads and patterns of two tokens at least."""
    return [
        make(
            f"r{i:02}",
            {
                POINT: torch.randn(i + 2, 4).bfloat16(),
                HEADS: torch.randn(i + 2, 2, 3).half(),
                WEIGHTS: Patterns(torch.rand((i + 2) * (i + 3)).bfloat16(), 2, range(i + 2)),
            },
            parts=2,
            sample_id=f"s{i}",
            tags={"label": str(i % 2)},
            created=1763700000.5 + i,
            finish_reason="stop",
            sampling={"top_p": 0.5},
            interventions=[{"op": "add"}] if i else [],
        )
        for i in range(12)
    ]


@pytest.fixture(scope="module")
def store(made, make, tmp_path_factory):
    """Those in the session `session` in several files, and a run of another point in `other`."""
    root = tmp_path_factory.mktemp("store")
    files = stored(root, *made, make("else", {"norm.output": torch.ones(2, 3)}, session_id="other"), segment_bytes=4000)
    assert len(files) > 3
    return root


def is_mapped(values: np.ndarray, path: Path) -> bool:
    """Whether an array lies in this process's map of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split()
        low, high = (int(place, 16) for place in span.split("-"))
        if name == str(path) and low <= values.ctypes.data < high:
            return True
    return False


def joined(made, name) -> torch.Tensor:
    return torch.cat([one.points[name] for one in made])


def test_a_table_holds_the_stored_bits_row_by_row(store, made):
    found = table(store, session="session")
    assert found.column_names == [*COLUMNS, POINT, HEADS, WEIGHTS]
    assert found["run_id"].to_pylist() == [one.facts.run_id for one in made for _ in one.points[POINT]]
    bits = found[POINT].combine_chunks().to_numpy_ndarray()
    assert torch.equal(torch.from_numpy(bits.copy()).view(torch.bfloat16), joined(made, POINT))
    assert found[HEADS].combine_chunks().to_numpy_ndarray().shape == (90, 2, 3)
    assert found.schema.field(HEADS).metadata == {b"dtype": b"float16", b"shape": b"[2, 3]"}


def test_files_without_roles_are_read_like_others(make, tmp_path):
    made, old = make("new"), make("old", session_id="older")
    old = old._replace(batches=[batch.drop_columns(["role", "turn"]) for batch in old.batches])
    stored(tmp_path, made, old)
    assert table(tmp_path, ["role", "turn"]).to_pylist() == [{"role": None, "turn": None}] * 6
    assert table(tmp_path).num_rows == len(index_rows(tmp_path, ["layers.0.output"])) == 6
    run = read_run(tmp_path, "old", verify=True)
    assert (run.roles, len(run.token_ids)) == (None, 3)
    assert next(of_files(segments(tmp_path, "older")[0])).roles is None
    with pytest.raises(RequestError, match="roles of the tokens of run old are not known"):
        index_rows(tmp_path, ["layers.0.output"], session="older", tokens={"role": "user"})


def test_a_plain_table_holds_numbers(store, made):
    found = table(store, [HEADS, POINT, WEIGHTS], session="session", plain=True)
    values = torch.from_numpy(found[POINT].combine_chunks().flatten().to_numpy().reshape(90, 4).copy())
    assert torch.equal(values, joined(made, POINT).float())
    heads = found[HEADS].combine_chunks().flatten().to_numpy().reshape(90, 2, 3).copy()
    assert torch.equal(torch.from_numpy(heads), joined(made, HEADS).float())
    assert found[WEIGHTS].to_pylist()[2] == made[1].points[WEIGHTS][0].float().flatten().tolist()
    assert found.schema.field(POINT).metadata[b"dtype"] == b"bfloat16"


def test_large_batches_are_views_of_the_file(make, tmp_path):
    made = make("r", {POINT: torch.randn(4096, 1024)})  # 16 MiB
    stored(tmp_path, made)
    before = pa.total_allocated_bytes()
    found = table(tmp_path, [POINT])
    assert pa.total_allocated_bytes() - before < 1 << 20
    values = found[POINT].chunk(0).to_numpy_ndarray()
    assert np.array_equal(values, made.points[POINT].numpy())
    assert is_mapped(values, segments(tmp_path)[0])


def test_runs_are_a_table_with_what_they_are(store, made):
    found = runs_table(store)
    assert len(found) == 13
    [row] = runs_table(store, runs=["r03"]).to_pylist()
    assert (row["session_id"], row["sample_id"], row["tags"]) == ("session", "s3", [("label", "1")])
    assert (row["prompt_tokens"], row["tokens"], row["rows"]) == (4, 5, 5)
    assert (row["points"], str(row["created"])) == ([POINT, HEADS, WEIGHTS], "2025-11-21 04:40:03.500000")
    assert (json.loads(row["sampling"]), json.loads(row["interventions"])) == ({"top_p": 0.5}, [{"op": "add"}])


def test_pandas_and_polars_join_tokens_with_their_runs(store, made):
    plain = table(store, ["run_id", "phase", POINT], session="session", plain=True)
    tokens, runs = plain.to_pandas(), runs_table(store).to_pandas()
    runs["label"] = [dict(tags).get("label") for tags in runs["tags"]]
    both = tokens.merge(runs, on="run_id")
    assert both.groupby("label").size().to_dict() == {"0": 42, "1": 48}
    assert np.array_equal(np.stack(both[POINT]), joined(made, POINT).float().numpy())
    assert tokens["phase"].value_counts().to_dict() == {"prompt": 78, "generated": 12}
    first = polars.from_arrow(plain).select(polars.col(POINT).arr.first()).to_series().to_list()
    assert first == joined(made, POINT)[:, 0].float().tolist()
    assert len(polars.from_arrow(table(store, ["token_id", POINT], session="session"))) == 90


def test_duckdb_computes_over_both_tables(store, made):
    tokens = table(store, ["run_id", "phase", POINT], session="session", plain=True)  # noqa: F841 - DuckDB finds it
    runs = runs_table(store)  # noqa: F841
    found = duckdb.sql(
        f"""select tags['label'] as label, count(*) as tokens, avg(list_sum("{POINT}"::float[])) as mean
        from tokens join runs using (run_id) where phase = 'prompt' group by label order by label"""
    ).fetchall()
    assert [row[:2] for row in found] == [("0", 36), ("1", 42)]
    odd = torch.cat([one.points[POINT][:-1] for one in made[1::2]]).float().sum(1).mean()
    assert found[1][2] == pytest.approx(float(odd), rel=1e-5)
    assert len(duckdb.sql("select * from runs").fetchall()) == 13


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({}, ValueError, "columns: the runs 'else' and 'r00' differ in points"),
        ({"columns": []}, ValueError, "columns: name at least one"),
        ({"columns": POINT}, ValueError, "name at least one, as a list"),
        ({"columns": ["run_id", "nothing"]}, RequestError, "'nothing'; there is"),
        ({"columns": [POINT, "norm.output"]}, ValueError, "no whole run has all of them"),
        ({"runs": ["r99"]}, RequestError, "no run 'r99'"),
        ({"session": "never"}, FileNotFoundError, "no session 'never'"),
    ],
)
def test_what_fits_no_table_is_refused(store, given, error, match):
    with pytest.raises(error, match=match):
        table(store, **given)


def test_ray_reads_every_row_with_its_run(cluster, store, made):
    from deployments.activations.reader.ray_data import ray_dataset

    found = ray_dataset(store, [POINT, HEADS], bfloat16="bits", override_num_blocks=3)
    assert found.count() == 90
    batches = list(found.iter_batches(batch_size=32))
    rows = {
        (run, position): (token, phase, value, heads)
        for batch in batches
        for run, position, token, phase, value, heads in zip(
            *(batch[name] for name in ("run_id", "position", "token_id", "phase", POINT, HEADS)), strict=True
        )
    }
    assert len(rows) == 90
    for one in made:
        for i, (value, heads) in enumerate(zip(one.points[POINT], one.points[HEADS], strict=True)):
            token, phase, got, its_heads = rows[one.facts.run_id, i]
            assert (token, phase) == (100 + i, "generated" if i == one.facts.prompt_tokens else "prompt")
            got = torch.from_numpy(np.array(got))
            assert torch.equal(got.view(torch.bfloat16), value)
            assert torch.equal(torch.from_numpy(np.array(its_heads)), heads)
