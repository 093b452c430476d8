"""What a server says of an answer's activations is counted as it is: stored, not stored, or not known."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evals.activations_meta import ITEM_BYTES, bytes_of, why_not_stored
from evals.results.tally import ActivationTally
from evals.task.trajectory import Sample, Turn

POINT = "layers.1.output"
RUN = {"run_id": "r1", "tokens": 4, "points": {}}


def sample(*metas: dict[str, Any] | None) -> Sample:
    cost = {"finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 1, "latency_s": 0.1}
    turns = [Turn(activations=meta, **cost) for meta in metas]
    asked = {"id": "a", "mode": "no-tools", "variant": "control", "question": "q", "gold": "1"}
    return Sample(turns=turns, messages=[], started=0, ended=1, latency_s=1, **asked)


def summary(*metas: dict[str, Any] | None) -> dict[str, Any]:
    tally = ActivationTally("s")
    tally.add(sample(*metas))
    return tally.summary()


def stored(shape: Any, dtype: Any) -> dict[str, Any]:
    at = {"uri": "file:///s/1.arrow", "first_row": 0, "shape": shape, "dtype": dtype}
    return {"session_id": "s", "status": "stored", "runs": [RUN | {"points": {POINT: at}}]}


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ({"status": "stored", "runs": [RUN]}, None),
        (None, "the answer has no activations_meta"),
        ({"status": "failed", "reason": "the disk is full", "runs": [RUN]}, "the disk is full"),
        ({"status": "failed"}, "the server gives no reason"),
        ({"status": "pending", "runs": [RUN]}, "the answer says 'pending'"),
        ({"status": "inline", "reason": "small"}, "the answer says 'inline': small"),
        ({}, "the answer says None"),
        ({"status": "stored", "runs": None}, "the answer says 'stored' and names no run"),
        ({"status": "stored", "runs": [{"tokens": 4}, 7]}, "the answer says 'stored' and names no run"),
    ],
)
def test_only_an_answer_that_says_so_is_stored_and_others_have_the_servers_words(
    meta: dict[str, Any] | None, why: str | None
) -> None:
    assert why_not_stored(meta) == why


def test_however_many_reasons_there_are_few_are_kept_and_all_counted() -> None:
    found = summary(*({"status": "failed", "reason": f"no run {i}"} for i in range(100)))
    assert len(found["why_not_stored"]) == 21
    assert sum(found["why_not_stored"].values()) == found["not_stored"] == 100
    assert found["why_not_stored"]["other reasons"] == 80


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ([4, 2], "float8_e4m3fn"),
        ([4, 2], None),
        ([4, 2], ["bfloat16"]),
        (None, "float32"),
        ([], "float32"),
        ([4, 2, None], "float32"),  # attention patterns
    ],
)
def test_bytes_that_are_not_known_are_no_number(shape: Any, dtype: Any) -> None:
    assert summary(stored([4, 2], "float32"))["bytes"] == 32
    found = summary(stored([4, 2], "float32"), stored(shape, dtype))
    assert (found["bytes"], found["runs"], found["points"]) == (None, 2, [POINT])


@given(st.recursive(st.none() | st.integers(-2, 9) | st.booleans() | st.text(max_size=2) | st.floats(), st.lists))
def test_any_shape_is_counted_or_not_known(shape: Any) -> None:
    assert (bytes_of({"shape": shape, "dtype": "uint8"}) or 0) >= 0


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_the_size_of_a_number_is_torchs(name: str) -> None:
    assert bytes_of({"shape": [1], "dtype": name}) == getattr(torch, name).itemsize
