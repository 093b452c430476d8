"""What a server says of an answer's activations is counted as it is: stored, not stored, or not known."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.points.patterns import Patterns, keys
from evals.activations_meta import ITEM_BYTES, item_bytes, shape_of, values_of, why_not_stored
from evals.results.tally import ActivationTally
from evals.task.trajectory import Sample, Turn

WEIGHTS = "layers.1.attention.weights"
RUN = {"run_id": "r1", "tokens": 4, "points": {}}


def sample(*metas: dict[str, Any] | None) -> Sample:
    cost = {"finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 1, "latency_s": 0.1}
    turns = [Turn(activations=meta, **cost) for meta in metas]
    asked = {"id": "a", "mode": "no-tools", "variant": "control", "question": "q", "gold": "1"}
    return Sample(turns=turns, messages=[], started=0, ended=1, latency_s=1, **asked)


def summary(*metas: dict[str, Any] | None, tokens: str = "all") -> dict[str, Any]:
    tally = ActivationTally("s", tokens)
    tally.add(sample(*metas))
    return tally.summary()


def stored(shape: Any, dtype: Any, *, tokens: int = 4) -> dict[str, Any]:
    at = {"uri": "file:///s/1.arrow", "first_row": 0, "shape": shape, "dtype": dtype}
    return {"session_id": "s", "status": "stored", "runs": [RUN | {"tokens": tokens, "points": {WEIGHTS: at}}]}


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


def test_answers_that_are_not_stored_are_counted_by_their_reasons_and_apart_from_what_is() -> None:
    full = {"status": "failed", "reason": "the disk is full", "runs": [RUN | {"run_id": "r2"}]}
    found = summary(stored([4, 2], "float32"), full, None, full, {"status": "pending", "runs": [RUN]})
    assert (found["answers"], found["not_stored"], found["runs"], found["tokens"]) == (5, 4, 1, 4)
    assert found["why_not_stored"] == {
        "the disk is full": 2,
        "the answer has no activations_meta": 1,
        "the answer says 'pending'": 1,
    }
    assert found["statuses"] == {"stored": 1, "failed": 2, "missing": 1, "pending": 1}


def test_however_many_reasons_there_are_few_are_kept_and_all_counted() -> None:
    found = summary(*({"status": "failed", "reason": f"no run {i}"} for i in range(100)))
    assert len(found["why_not_stored"]) == 21
    assert sum(found["why_not_stored"].values()) == found["not_stored"] == 100
    assert found["why_not_stored"]["other reasons"] == 80


@pytest.mark.parametrize("first", [0, 1, 7])
@pytest.mark.parametrize(("tokens", "rows"), [("all", 9), ("last:2", 2), ("generated", 5), ("last", 1)])
def test_bytes_of_attention_patterns_are_those_of_the_tokens_that_each_row_sees(
    tokens: str, rows: int, first: int
) -> None:
    seen = rows if tokens == "all" else rows + first
    positions = range(seen - rows, seen)
    values = Patterns(torch.zeros(3 * keys(positions), dtype=torch.bfloat16), 3, positions)
    assert summary(stored(list(values.shape), "bfloat16", tokens=seen), tokens=tokens)["bytes"] == values.nbytes


def test_bytes_of_a_prompts_patterns_do_not_hang_on_what_was_generated() -> None:
    values = Patterns(torch.zeros(2 * keys(range(5))), 2, range(5))
    assert summary(stored([5, 2, None], "float32", tokens=90), tokens="prompt")["bytes"] == values.nbytes


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ([4, 2], "float8_e4m3fn", "the size of the dtype 'float8_e4m3fn' is not known"),
        ([4, 2], None, "the size of the dtype None is not known"),
        ([4, 2], ["bfloat16"], "the size of the dtype ['bfloat16'] is not known"),
        (None, "float32", "the server says that its shape is None"),
        ([], "float32", "the server says that its shape is []"),
        ([None, 2], "float32", "the server says that its shape is [None, 2]"),
    ],
)
def test_bytes_that_are_not_known_are_no_number_and_say_of_which_point(shape: Any, dtype: Any, why: str) -> None:
    found = summary(stored([4, 2], "float32"), stored(shape, dtype))
    assert found["bytes"] is None
    assert found["bytes_why_not"] == f"{WEIGHTS} of r1: {why}"
    assert (found["runs"], found["points"]) == (2, [WEIGHTS])


@given(st.recursive(st.none() | st.integers(-2, 9) | st.booleans() | st.text(max_size=2) | st.floats(), st.lists))
def test_any_shape_is_counted_or_refused_with_its_words(shape: Any) -> None:
    try:
        known = shape_of({"shape": shape})
    except ValueError:
        with pytest.raises(ValueError, match=re.escape(repr(shape))):
            shape_of({"shape": shape})
    else:
        assert values_of(known, seen=known[0] or 0) >= 0


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_the_size_of_a_number_is_torchs(name: str) -> None:
    assert item_bytes({"dtype": name}) == getattr(torch, name).itemsize
