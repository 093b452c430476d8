"""Exports equal the stored runs bit for bit, have the names that scripts expect, and overwrite nothing."""

from __future__ import annotations

import glob
import json
import sys
import tempfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from storing import store as stored

from deployments.activations.exports import FACTS, export, pt_name
from deployments.errors import RequestError
from deployments.points.patterns import Patterns, keys

NORM, HEADS, WEIGHTS = "layers.12.input_layernorm.output", "layers.1.attention.heads", "layers.1.attention.weights"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    same = left.dtype == right.dtype and left.shape == right.shape
    return same and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@st.composite
def some_points(draw):
    """Points of any bits, NaNs among them, in one to three parts: the rows of one to seven tokens."""
    rows = draw(st.integers(1, 7))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    any_bits = lambda *shape: torch.randint(0, 256, shape, generator=seed, dtype=torch.uint8)  # noqa: E731
    points = {}
    for name in (NORM, HEADS):
        dtype, shape = draw(st.sampled_from(DTYPES)), (rows, *draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
        points[name] = any_bits(*shape[:-1], shape[-1] * dtype.itemsize).view(dtype)
    dtype, heads = draw(st.sampled_from(DTYPES[:3])), draw(st.integers(1, 3))
    points[WEIGHTS] = Patterns(any_bits(heads * keys(range(rows)) * dtype.itemsize).view(dtype), heads, range(rows))
    return points, draw(st.integers(1, min(rows, 3)))


def dense(value):
    return value.padded() if isinstance(value, Patterns) else value


@given(some_points())
def test_every_format_holds_the_stored_bits(make, drawn):
    points, parts = drawn
    rows = len(points[NORM])
    with tempfile.TemporaryDirectory() as folder:
        root, to = Path(folder) / "store", Path(folder) / "to"
        made = make("r", points, parts=parts, tags={"k": "\u00e9"})
        stored(root, made)
        files = {format: export(root, to, format) for format in ("pt", "safetensors", "npz", "parquet", "hf")}

        for name, value in points.items():
            (pt,) = [torch.load(file) for file in files["pt"] if file.name == pt_name("session", "r", name)]
            assert same_bits(pt, dense(value)[None])

        (path,) = files["safetensors"]
        found = safetensors.torch.load_file(path)
        assert all(same_bits(found[name], dense(value)) for name, value in points.items())
        assert found["token_id"].tolist() == list(range(100, 100 + rows))
        assert found[f"{WEIGHTS}.lengths"].tolist() == list(range(1, rows + 1))
        with safetensors.safe_open(path, "pt") as opened:
            assert json.loads(opened.metadata()[FACTS])["tags"] == {"k": "\u00e9"}

        found = np.load(*files["npz"])
        dtypes = json.loads(str(found[FACTS]))["dtypes"]
        for name, value in points.items():
            value = dense(value)
            assert dtypes[name] == str(value.dtype)[6:]
            kept = value.float() if value.dtype == torch.bfloat16 else value
            assert same_bits(torch.from_numpy(found[name]), kept)
        assert found["position"].tolist() == list(range(rows))

        table = pq.read_table(*files["parquet"])
        assert table["phase"].to_pylist() == ["prompt"] * (rows - 1) + ["generated"]
        for name, value in points.items():
            said = table.schema.field(name).metadata
            dtype = getattr(torch, said[b"dtype"].decode())
            flat = torch.from_numpy(table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False).copy())
            values = value.values if isinstance(value, Patterns) else value.reshape(-1)
            assert dtype == values.dtype
            assert same_bits(flat.view(dtype), values)
            assert json.loads(said[b"shape"])[0] == value.shape[1]

        found = datasets.load_from_disk(*files["hf"])
        assert found["position"][:] == list(range(rows))
        assert found["phase"][:] == ["prompt"] * (rows - 1) + ["generated"]
        for name, value in points.items():
            column = found.data.column(name).combine_chunks()
            while hasattr(column, "flatten") and pa.types.is_nested(column.type):
                column = column.flatten()
            values = value.values if isinstance(value, Patterns) else value.reshape(-1)
            kept = values.float() if values.dtype == torch.bfloat16 else values
            assert same_bits(torch.from_numpy(column.to_numpy(zero_copy_only=False).copy()), kept)


@pytest.fixture
def store(make, tmp_path):
    """Two sessions: of two runs with the same points, and of two with others."""
    root = tmp_path / "store"
    norm, head = lambda: {NORM: torch.randn(3, 4).bfloat16()}, lambda: {"lm_head.output": torch.randn(3, 9)}
    mixed = [make("m1", norm(), session_id="mixed"), make("m2", head(), session_id="mixed")]
    stored(root, make("r1", norm()), make("r2", norm()), *mixed)
    return root


def names(files) -> list[str]:
    return sorted(file.name for file in files)


def test_files_of_one_tensor_have_the_names_that_older_scripts_glob_for(store, tmp_path):
    export(store, tmp_path / "pt", "pt", session="session")
    pattern = tmp_path / "pt" / "activations_session_*_layer_12_input_layernorm_output.pt"
    assert [torch.load(file).shape for file in sorted(glob.glob(str(pattern)))] == [(1, 3, 4), (1, 3, 4)]


def test_a_point_by_a_modules_path_and_an_odd_run_id_make_plain_names():
    assert pt_name("s", "../r/1", "model.layers.3.q_proj.input") == "activations_s_.._r_1_model_layer_3_q_proj_input.pt"


def test_a_hugging_face_dataset_has_typed_features_and_gives_tensors(make, tmp_path):
    points = {NORM: torch.randn(6, 4).bfloat16(), HEADS: torch.randn(6, 2, 3).half()}
    stored(tmp_path / "store", make("r", points, parts=2, sample_id="s"))
    (path,) = export(tmp_path / "store", tmp_path / "to", "hf")
    assert path.name == "activations_session.hf"
    found = datasets.load_from_disk(path)
    assert found.features[HEADS] == datasets.List(datasets.List(datasets.Value("float16"), length=3), length=2)
    assert torch.equal(found.with_format("torch")[1:5][NORM], points[NORM][1:5].float())


def test_without_datasets_the_export_says_what_to_install(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        export(store, tmp_path / "to", "hf")
    assert not (tmp_path / "to").exists()


def test_sessions_runs_and_points_are_chosen(store, tmp_path):
    assert names(export(store, tmp_path / "a", "npz")) == [
        *("activations_mixed_m1.npz", "activations_mixed_m2.npz"),
        *("activations_session_r1.npz", "activations_session_r2.npz"),
    ]
    assert names(export(store, tmp_path / "b", "npz", session="mixed", run="m2")) == ["activations_mixed_m2.npz"]
    assert names(export(store / "_" / "mixed", tmp_path / "c", "npz", points=[NORM])) == ["activations_mixed_m1.npz"]
    assert names(export(store, tmp_path / "d", "npz", run=["m1", "r2"])) == [
        *("activations_mixed_m1.npz", "activations_session_r2.npz"),
    ]


def test_runs_of_other_points_are_parquet_files_of_their_own(store, tmp_path):
    files = export(store, tmp_path, "parquet")
    assert names(files) == ["activations_mixed.parquet", "activations_mixed_2.parquet", "activations_session.parquet"]
    assert pq.read_table(files[-1])["run_id"].to_pylist() == ["r1"] * 3 + ["r2"] * 3


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"run": "r9"}, RequestError, "no run 'r9'; there is m1, m2, r1, r2"),
        ({"points": ["embed.output"]}, RequestError, "no such run recorded 'embed.output'; there is"),
        ({"run": "m2", "points": [NORM]}, RequestError, "no such run recorded"),
        ({"session": "never"}, FileNotFoundError, "no session 'never'"),
        ({"session": "../session"}, ValueError, "session_id"),
        ({"format": "csv"}, ValueError, "pt, safetensors, npz, parquet"),
    ],
)
@pytest.mark.parametrize("format", ["npz", "parquet"])
def test_what_is_not_there_is_refused_and_nothing_is_written(store, tmp_path, given, error, match, format):
    with pytest.raises(error, match=match):
        export(store, tmp_path / "to", **{"format": format, **given})
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("format", ["pt", "parquet"])
def test_no_file_is_overwritten_unless_that_is_asked_for(store, tmp_path, format):
    files = export(store, tmp_path, format, session="session")
    kept = files[-1].read_bytes()
    for file in files[:-1]:
        file.unlink()
    files[-1].write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=files[-1].name):
        export(store, tmp_path, format, session="session")
    assert files[-1].read_bytes() == b"precious"
    assert not any(file.exists() for file in files[:-1])
    export(store, tmp_path, format, session="session", overwrite=True)
    assert files[-1].read_bytes() == kept
    assert not list(tmp_path.glob(".export-*"))
