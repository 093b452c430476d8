"""A replica's cache of readouts: bounded, keeps those in use, and rejects unknown ones by field."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import save

from deployments.accounts import OPERATOR
from deployments.errors import RequestError
from deployments.readouts.resolver import NamedReadout, ReadoutCache

HIDDEN = 64


class Method:
    """A store's method, as Ray calls it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def remote(self, *args: Any) -> Any:
        return self._call(*args)


class Store:
    """Keeps probes of one model; counts how often a file is fetched."""

    def __init__(self, *names: str) -> None:
        self.fetched = list[str]()
        self.client_data = Method(self._client_data)
        self._names = names

    def _client_data(self, what: str, method: str, name: Any, *_: Any) -> Any:
        assert what == "readouts"
        if method == "list":
            return [{"name": name, "model": "demo"} for name in self._names]
        if method == "get":
            return {"id": name, "model": "demo"} if name in self._names else None
        self.fetched.append(name)
        spec = {"name": name, "model": "demo", "point": "layers.1.output", "kind": "linear"}
        return save({"weight": torch.ones(1, HIDDEN)}, {"spec": json.dumps(spec)})


def named(*names: str) -> dict[str, NamedReadout]:
    return {name: NamedReadout(f"readouts[{i}].name", OPERATOR) for i, name in enumerate(names)}


def held(store: Store, most: int = 2000, model: str = "demo") -> ReadoutCache:
    return ReadoutCache(model, torch.device("cpu"), store, most, ThreadPoolExecutor(1))


def test_what_is_held_is_fetched_once_and_what_was_used_longest_ago_goes_first() -> None:
    store = Store("a", "b", "c", "d")
    table = held(store)  # room for three

    async def run() -> None:
        for number, name in enumerate("aabcdba"):
            with table.lending(str(number)):
                assert list(await table.fetch(str(number), named(name))) == [name]

    asyncio.run(run())
    assert store.fetched == ["a", "b", "c", "d", "a"]


def test_readouts_in_use_stay_and_a_request_for_more_is_told_so() -> None:
    store = Store("a", "b", "c", "d")
    table = held(store)

    async def run() -> None:
        with table.lending("1"), table.lending("2"):
            await table.fetch("1", named("a", "b"))
            with pytest.raises(RequestError, match="other requests' readouts and lenses take") as refused:
                await table.fetch("2", named("c", "d"))
            assert (refused.value.status, refused.value.code) == (429, "server_busy")
        with table.lending("3"), pytest.raises(RequestError, match="max_request_tensor_bytes is 2000") as refused:
            await table.fetch("3", named("a", "b", "c", "d"))
        assert refused.value.field == "readouts[3].name"

    asyncio.run(run())


@pytest.mark.parametrize(("model", "name"), [("demo", "other"), ("another", "a")])
def test_what_is_not_there_for_the_model_is_refused_by_field(model: str, name: str) -> None:
    table = held(Store("a"), model=model)
    with pytest.raises(RequestError, match="readout") as refused:
        asyncio.run(table.fetch("1", named(name)))
    assert (refused.value.field, refused.value.code) == ("readouts[0].name", "readout_not_found")
