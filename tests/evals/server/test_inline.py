"""Sampled values are the stored ones, the same each time, bounded, and their failures are in the record."""

import asyncio
import io
import json
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from stored import Store, points

from deployments.activations import load
from deployments.points.patterns import Patterns
from evals.server import inline
from evals.server.client import ChatClient
from evals.server.inline import sampled_values

SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
# What a server may say of a shape, and what it may have in its place in the answer.
SAID = st.lists(st.none() | st.integers(-1, 6), max_size=4) | st.none() | st.text(max_size=2) | st.booleans()
HELD = st.none() | arrays.arrays(
    st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_, np.complex64, np.dtype("U3")]),
    SHAPES,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as running:
        yield running


def sample(store: Store, *metas: dict[str, Any] | None, values: int = 16, retries: int = 2) -> dict[str, Any]:
    async def fetch() -> dict[str, Any]:
        client = ChatClient(store.base_url, timeout=30, retries=retries, parallel=2, max_outage=60.0 * bool(retries))
        try:
            return await sampled_values(client.download, metas, values)
        finally:
            await client.close()

    return asyncio.run(fetch())


@pytest.mark.parametrize(("values", "rows", "across"), [(1, 1, 1), (16, 4, 4), (100, 12, 8), (1000, 20, 8)])
def test_values_are_the_stored_ones_and_no_more_than_asked_for(
    store: Store, values: int, rows: int, across: int
) -> None:
    found = sample(store, store.record("r1", points(1, 20)), store.record("r2", points(2, 5)), values=values)
    assert list(found) == ["r1", "r2"]
    for name, at in found["r1"].items():
        where, stored = at["sample_info"], load(store.directory / "evaluated", "r1")[name]
        assert (len(where["positions"]), len(where["dimensions"])) == (rows, across)
        assert torch.equal(torch.tensor(at["data"]), stored[where["positions"]][:, where["dimensions"]].float())
        assert (at["format"], at["shape"], at["dtype"]) == ("sampled", [20, 8], "bfloat16")


def test_the_same_run_gives_the_same_values_and_another_run_others(store: Store) -> None:
    metas = [store.record("r1", points(1, 40)), store.record("r2", points(1, 40))]
    first = sample(store, *metas)
    assert first == sample(store, *metas)
    places = [{json.dumps(at["sample_info"]) for at in of_run.values()} for of_run in first.values()]
    assert [len(each) for each in places] == [1, 1]
    assert places[0] != places[1]


def test_what_is_not_stored_is_not_asked_for_and_says_why(store: Store) -> None:
    full = {"status": "failed", "reason": "the disk is full", "runs": [{"index": 0, "run_id": "r1", "points": {}}]}
    found = sample(store, full, None, {"status": "pending", "runs": []})
    assert found == {
        "r1": {"error": "the disk is full"},
        "turn-1": {"error": "the answer has no activations_meta"},
        "turn-2": {"error": "the answer says 'pending'"},
    }
    assert store.requests == []


def test_a_busy_store_is_asked_again(store: Store) -> None:
    meta = store.record("r1", points(1, 4))
    store.refuse = 1
    assert "error" not in next(iter(sample(store, meta)["r1"].values()))


def test_what_cannot_be_fetched_is_said_in_its_place(store: Store) -> None:
    meta = store.record("r1", points(1, 4))
    store.refuse = 2
    found = sample(store, meta, meta | {"runs": [meta["runs"][0] | {"run_id": "gone"}]}, retries=0)
    assert {at["error"] for at in found["r1"].values()} == {
        "HTTP 503: the store does not answer; no usable answer for 0 s (--max-outage 0): --resume goes on when the "
        "server is back",
    }
    assert set(found["gone"]) == set(found["r1"])


def test_a_number_that_is_not_finite_is_null(store: Store) -> None:
    values = torch.tensor([[float("nan"), float("inf")], [1.0, -2.5]])
    found = sample(store, store.record("r1", {"layers.0.output": values}))
    assert found["r1"]["layers.0.output"]["data"] == [[None, None], [1.0, -2.5]]


def test_no_answer_is_larger_than_what_may_be_in_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = store.record("r1", points(1, 4) | {"layers.9.output": torch.zeros(4, 100)})
    monkeypatch.setattr(inline, "MOST_BYTES", 2 * 4 * 4 * 8)
    found = sample(store, meta)["r1"]
    assert [len(request["points"]) for request in store.requests] == [2, 2, 2]
    assert [name for name, at in found.items() if "error" in at] == ["layers.9.output"]


@given(
    said=st.lists(st.tuples(SAID, HELD), min_size=1, max_size=3),
    positions=arrays.arrays(np.int64, SHAPES),
    tokens=st.integers(-1, 6) | st.none(),
    values=st.integers(1, 40),
)
def test_whatever_shapes_a_server_says_and_sends_each_point_has_values_or_an_error(
    said: list[tuple[Any, np.ndarray | None]], positions: np.ndarray, tokens: int | None, values: int
) -> None:
    async def download(path: str, params: dict[str, Any], file: BinaryIO) -> None:
        held = {name: array for name, (_, array) in named.items() if array is not None and name in params["points"]}
        facts = np.array(json.dumps({"dtypes": dict.fromkeys(held, "float32")}))
        np.savez(file, **held, **{"run.facts": facts, "position": positions})

    named = {f"p{number}": each for number, each in enumerate(said)}
    places = {name: {"uri": "file:///x", "shape": shape, "dtype": "float32"} for name, (shape, _) in named.items()}
    meta = {"session_id": "s", "status": "stored", "runs": [{"run_id": "r", "tokens": tokens, "points": places}]}
    found = asyncio.run(sampled_values(download, [meta], values))
    json.dumps(found, allow_nan=False)
    assert list(found["r"]) == list(named)
    for name, at in found["r"].items():
        if "error" in at:
            assert at["error"]
            continue
        array, where = named[name][1], at["sample_info"]
        assert array is not None
        rows = array.reshape(len(array), -1)
        assert (len(at["data"]), {len(row) for row in at["data"]}) == (
            len(where["positions"]),
            {len(where["dimensions"])},
        )
        assert 1 <= sum(map(len, at["data"])) <= values
        assert at["shape"] == list(array.shape)
        assert max(where["dimensions"]) < rows.shape[1]


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ([0, 8], "it has no numbers: its shape is [0, 8], in a run of 4 tokens"),
        ([4, 0], "it has no numbers: its shape is [4, 0], in a run of 4 tokens"),
        ([], "the server says that its shape is []"),
        (None, "the server says that its shape is None"),
        ([None, 8], "the server says that its shape is [None, 8]"),
        ([4, "8"], "the server says that its shape is [4, '8']"),
    ],
)
def test_a_shape_that_holds_nothing_is_an_error_in_its_place_and_the_other_points_have_values(
    store: Store, shape: Any, why: str
) -> None:
    meta = store.record("r1", points(1, 4))
    odd = next(iter(meta["runs"][0]["points"].values()))
    odd["shape"] = shape
    first, *others = sample(store, meta)["r1"].values()
    assert first == {"format": "sampled", "error": why}
    assert others
    assert not any("error" in at for at in others)


def test_a_point_that_the_answer_lacks_fails_no_other(store: Store) -> None:
    meta = store.record("r1", points(1, 4))

    async def lacking(path: str, params: dict[str, Any], file: BinaryIO) -> None:
        facts = np.array(json.dumps({"dtypes": {"a": "float32"}}))
        np.savez(file, a=np.ones((4, 8)), position=np.arange(4), **{"run.facts": facts})

    meta["runs"][0]["points"] = {name: {"shape": [4, 8], "dtype": "float32"} for name in ("b", "a")}
    b, a = asyncio.run(sampled_values(lacking, [meta], 4))["r1"].values()
    assert b["error"].startswith("the answer does not hold it: KeyError")
    assert a["data"] == [[1, 1], [1, 1]]


@pytest.mark.parametrize("body", [b"", b"PK\x03\x04 and no more", b"{}", b"\x93NUMPY\x01\x00v\x00{"])
def test_an_answer_that_is_no_file_is_said_in_each_points_place(body: bytes) -> None:
    async def download(path: str, params: dict[str, Any], file: BinaryIO) -> None:
        file.write(body)

    places = {name: {"shape": [4, 8], "dtype": "bfloat16"} for name in ("a", "b")}
    meta = {"session_id": "s", "status": "stored", "runs": [{"run_id": "r", "tokens": 4, "points": places}]}
    found = asyncio.run(sampled_values(download, [meta], 4))["r"]
    assert all(at["error"].startswith("the answer is no npz file of the run: ") for at in found.values())
    assert list(found) == ["a", "b"]


def test_a_damaged_file_is_said_in_each_points_place(store: Store) -> None:
    meta = store.record("r1", points(1, 40))

    async def damaged(path: str, params: dict[str, Any], file: BinaryIO) -> None:
        np.savez_compressed(file, position=np.arange(4), **{"run.facts": np.array("{}" * 99)})
        file.seek(60)
        file.write(bytes(30))

    found = asyncio.run(sampled_values(damaged, [meta], 4))["r1"]
    assert {at["error"].partition(":")[0] for at in found.values()} == {"the answer is no npz file of the run"}


@pytest.mark.parametrize(("large", "compression"), [("a", 8), ("position", 8), ("run.facts", 8), ("a", 12)])
def test_a_small_answer_that_would_inflate_without_end_is_refused_before_it_does(large: str, compression: int) -> None:
    claimed = np.lib.format.header_data_from_array_1_0(np.empty((0,))) | {"shape": (1 << 23,)}
    np.lib.format.write_array_header_1_0(header := io.BytesIO(), claimed)
    members = {"a": np.ones((4, 8)), "position": np.arange(4), "run.facts": np.array('{"dtypes": {"a": "float32"}}')}
    with zipfile.ZipFile(packed := io.BytesIO(), "w", compression) as file:
        for name, array in members.items():
            if name == large:
                with file.open(f"{name}.npy", "w") as member:
                    member.write(header.getvalue())
                    for _ in range(8):  # 64 MiB, in 64 KiB
                        member.write(bytes(8 << 20))
            else:
                np.lib.format.write_array(plain := io.BytesIO(), array)
                file.writestr(f"{name}.npy", plain.getvalue())

    async def download(path: str, params: dict[str, Any], file: BinaryIO) -> None:
        file.write(packed.getvalue())

    assert len(packed.getvalue()) < 1 << 20
    places = {"a": {"shape": [4, 8], "dtype": "float32"}}
    meta = {"session_id": "s", "status": "stored", "runs": [{"run_id": "r", "tokens": 4, "points": places}]}
    tracemalloc.start()
    found = asyncio.run(sampled_values(download, [meta], 4))["r"]["a"]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert large in found["error"]
    assert most < 4 << 20


def test_attention_patterns_are_sampled_with_zeros_behind_what_a_token_sees(store: Store) -> None:
    values = torch.arange(1, 21).float()
    found = sample(store, store.record("r1", {"layers.0.attention.weights": Patterns(values, 2, range(4))}), values=999)
    at = found["r1"]["layers.0.attention.weights"]
    assert at["shape"] == [4, 2, 4]
    assert at["data"][0] == [1, 0, 0, 0, 2, 0, 0, 0]
    assert at["data"][3] == [float(number) for number in range(13, 21)]
