"""Sampled values are the stored ones, the same each time, bounded, and their failures are in the record."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import Store, points

from deployments.activations import load
from evals import inline
from evals.client import ChatClient
from evals.inline import sampled_values


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
    found = sample(store, store.record("r1", points(1, 20)), None, store.record("r2", points(2, 5)), values=values)
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


def test_what_was_not_stored_is_not_asked_for(store: Store) -> None:
    assert sample(store, None, {"status": "failed", "reason": "the disk is full", "runs": []}) == {}
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
        "HTTP 503: the store does not answer; nothing has answered for 0 s (--max-outage 0): --resume goes on when the "
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
