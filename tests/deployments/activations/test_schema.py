from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.activations.facts import FileInfo, RunInfo, check_session_id
from deployments.activations.segments.columns import to_batch
from deployments.activations.segments.schema import Packed, batch_info, batch_metadata
from deployments.points.patterns import Patterns

SEGMENT = FileInfo("session", "model", "main", "Qwen3ForCausalLM", {"torch": "2"}, {"p": "model.p.output"})


def batch(points, positions=(0, 1, 2), **options):
    given = {"run_id": "r", "sample_id": None, "token_ids": [7, 8, 9], "prompt_tokens": 2, **options}
    return to_batch(SEGMENT, positions=positions, points=points, **given)


@pytest.mark.parametrize(
    "value",
    ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a\n", "\n", "a b", "é", "a%2f", "a\0", "a" * 129],
)
def test_what_could_reach_outside_the_root_cannot_name_a_session(value):
    with pytest.raises(ValueError, match="session_id"):
        check_session_id(value)


def test_rows_carry_ids_positions_and_phases():
    rows = batch({"p": torch.zeros(3, 2)}, sample_id="gsm8k-7", text_offsets=[0, 3, 5]).select(range(6)).to_pylist()
    assert rows[1:] == [
        {"run_id": "r", "sample_id": "gsm8k-7", "position": 1, "phase": "prompt", "token_id": 8, "text_offset": 3},
        {"run_id": "r", "sample_id": "gsm8k-7", "position": 2, "phase": "generated", "token_id": 9, "text_offset": 5},
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_contiguous_tensors_are_not_copied(dtype):
    tensor = torch.randn(3, 2, 4).to(dtype)
    column = batch({"p": tensor})["p"]
    assert column.storage.flatten().buffers()[1].address == tensor.data_ptr()


def test_a_strided_tensor_is_stored_by_its_values():
    tensor = torch.randn(4, 3).T
    assert batch({"p": tensor})["p"].to_numpy_ndarray().tolist() == tensor.tolist()


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ({"p": torch.zeros(2, 4)}, "shape"),
        ({"p": torch.zeros(3)}, "shape"),
        ({"p": torch.zeros(3, 0)}, "shape"),
        ({"p": torch.zeros(3, 4, device="meta")}, "meta"),
        ({"p": torch.zeros(3, 4, dtype=torch.complex64)}, "complex64"),
        ({"token_id": torch.zeros(3, 4)}, "token_id"),
    ],
)
def test_what_does_not_fit_the_columns_is_refused(points, reason):
    with pytest.raises(ValueError, match=reason):
        batch(points)


@pytest.mark.parametrize(("positions", "tokens"), [([0, 1], [1, 2, 3]), ([], [])])
def test_rows_without_a_position_and_a_token_each_are_refused(positions, tokens):
    with pytest.raises(ValueError, match="positions"):
        batch({"p": torch.zeros(3, 4)}, positions=positions, token_ids=tokens)


def test_the_metadata_of_batches_reads_back_and_its_last_one_says_what_the_run_is():
    run = RunInfo("r", "session", "model", 1.0, 2, 3, tags={"k": "\u00e9"})
    told = [
        batch_info({key.encode(): value.encode() for key, value in one.items()})
        for one in (*batch_metadata("r", 0, 2), *batch_metadata("r", 2, 1, run))
    ]
    assert told == [("r", 0, None, None), ("r", 1, None, None), ("r", 2, run, 3)]
    with pytest.raises(ValueError, match="names no run"):
        batch_info({b"other": b"x"})


@given(rows=st.integers(1, 5), first=st.integers(0, 3))
def test_a_packed_batch_is_unpickled_as_it_was_without_a_copy_of_its_values(rows, first):
    positions, patterns = range(first, first + rows), range(first + 1, first + rows + 1)
    points = {"a": torch.randn(rows, 3).bfloat16(), "b": Patterns(torch.randn(2 * sum(patterns)), 2, positions)}
    batch = to_batch(
        FileInfo("s", "m", None, "A", {}, {}),
        run_id="r",
        sample_id=None,
        positions=positions,
        token_ids=positions,
        prompt_tokens=2,
        points=points,
    )
    buffers = list[pickle.PickleBuffer]()
    said = pickle.dumps(Packed(batch), protocol=5, buffer_callback=buffers.append)
    found = pickle.loads(said, buffers=buffers)  # noqa: S301 - it was pickled here
    assert found.equals(batch, check_metadata=True)
    [stream] = map(memoryview, buffers)
    start = np.frombuffer(stream, np.uint8).ctypes.data
    assert start <= found["a"].storage.values.buffers()[1].address < start + stream.nbytes
