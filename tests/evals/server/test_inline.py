"""Sampled values are the stored ones, the same each time, bounded, and their failures are in the record."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored import Store, points

from deployments.activations import read_run
from deployments.points.patterns import Patterns
from evals.server import inline
from evals.server.client import ChatClient
from evals.server.inline import sampled_values


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as running:
        yield running


def sample(store: Store, *metas: dict[str, Any] | None, values: int = 16, retries: int = 2) -> dict[str, Any]:
    async def fetch() -> dict[str, Any]:
        client = ChatClient(store.base_url, timeout=30, retries=retries, parallel=2, max_outage=60.0 * bool(retries))
        try:
            return await sampled_values(client, metas, values)
        finally:
            await client.close()

    return asyncio.run(fetch())


@pytest.mark.parametrize(("values", "rows", "across"), [(1, 1, 1), (16, 4, 4), (100, 12, 8), (1000, 20, 8)])
def test_values_are_the_stored_ones_and_no_more_than_asked_for(
    store: Store, values: int, rows: int, across: int
) -> None:
    sampled = sample(store, store.record("r1", points(1, 20)), store.record("r2", points(2, 5)), values=values)
    assert list(sampled) == ["r1", "r2"]
    for name, at in sampled["r1"].items():
        where, stored = at["sample_info"], read_run(store.directory / "_" / "evaluated", "r1")[name]
        assert (len(where["positions"]), len(where["dimensions"])) == (rows, across)
        assert torch.equal(torch.tensor(at["data"]), stored[where["positions"]][:, where["dimensions"]].float())
        assert (at["format"], at["shape"], at["dtype"]) == ("sampled_tensor", [20, 8], "bfloat16")


def test_the_same_run_gives_the_same_values_and_another_run_others(store: Store) -> None:
    metas = [store.record("r1", points(1, 40)), store.record("r2", points(1, 40))]
    first = sample(store, *metas)
    assert first == sample(store, *metas)
    places = [{json.dumps(at["sample_info"]) for at in of_run.values()} for of_run in first.values()]
    assert [len(each) for each in places] == [1, 1]
    assert places[0] != places[1]


def test_what_is_not_stored_is_not_asked_for_and_says_why(store: Store) -> None:
    full = {"status": "failed", "reason": "the disk is full", "runs": [{"index": 0, "run_id": "r1", "points": {}}]}
    sampled = sample(store, full, None, {"status": "pending", "runs": []})
    assert sampled == {
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
    sampled = sample(store, meta, meta | {"runs": [meta["runs"][0] | {"run_id": "gone"}]}, retries=0)
    assert sampled["r1"]["error"].endswith("does not answer: HTTP 503: run: the store does not answer")
    assert sampled["gone"] == {"error": "the server does not list it"}


def test_a_number_that_is_not_finite_is_null(store: Store) -> None:
    values = torch.tensor([[float("nan"), float("inf")], [1.0, -2.5]])
    sampled = sample(store, store.record("r1", {"layers.0.output": values}))
    assert sampled["r1"]["layers.0.output"]["data"] == [[None, None], [1.0, -2.5]]


def test_a_run_that_is_larger_than_what_may_be_copied_is_said_to_be(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = store.record("r1", points(1, 4))
    monkeypatch.setattr(inline, "MOST_BYTES", 100)
    assert sample(store, meta)["r1"]["error"].endswith("bytes: sample it from its file")
    assert store.requests == []


@given(changes=st.dictionaries(st.integers(0, 1 << 16), st.integers(0, 255), max_size=20), cut=st.integers(0, 1 << 16))
@settings(suppress_health_check=list(HealthCheck))
def test_whatever_bytes_a_server_sends_a_run_has_values_or_an_error(
    store: Store, changes: dict[int, int], cut: int
) -> None:
    meta = store.record(f"r{len(store.requests)}", points(1, 4))

    def changed(data: bytes) -> bytes:
        body = bytearray(data)
        for place, value in changes.items():
            body[place % len(body)] = value
        return bytes(body[: max(1, cut % len(body))])

    store.sends = changed
    [of_run] = sample(store, meta, retries=0).values()
    json.dumps(of_run, allow_nan=False)
    assert of_run
    for at in {"": of_run}.values() if "error" in of_run else of_run.values():
        assert at.get("error") or at["data"]


def test_a_point_that_the_file_lacks_fails_no_other(store: Store) -> None:
    meta = store.record("r1", points(1, 4))
    places = meta["runs"][0]["points"]
    meta["runs"][0]["points"] = {"b": next(iter(places.values()))} | places
    first, *others = sample(store, meta)["r1"].values()
    assert first["error"].startswith("KeyError")
    assert len(others) == len(places)
    assert not any("error" in at for at in others)


@pytest.mark.parametrize("body", [b"", b"PK\x03\x04 and no more", b"{}", b"ARROW1\0\0" + b"\xff" * 300])
def test_what_is_no_file_is_said(store: Store, body: bytes) -> None:
    meta = store.record("r1", points(1, 4))
    store.sends = lambda data: body
    assert set(sample(store, meta, retries=0)["r1"]) == {"error"}


def test_attention_patterns_are_sampled_with_zeros_behind_what_a_token_sees(store: Store) -> None:
    values = torch.arange(1, 21).float()
    sampled = sample(
        store, store.record("r1", {"layers.0.attention.weights": Patterns(values, 2, range(4))}), values=999
    )
    at = sampled["r1"]["layers.0.attention.weights"]
    assert at["shape"] == [4, 2, 4]
    assert at["data"][0] == [1, 0, 0, 0, 2, 0, 0, 0]
    assert at["data"][3] == [float(number) for number in range(13, 21)]
