"""If an answer is lost but its runs were stored, they are not stored again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from deployments.collect import collect, remote
from vitrine.connection.transport import Transport

ROWS = [{"text": f"text {number}"} for number in range(4)]


class FlakyServer:
    """Stores the prompts of each request, and fails as it is given; a number is how many of its runs it stores."""

    def __init__(self, faults: Iterable[tuple[int, int]]) -> None:
        self.stored: list[str] = []
        self.faults = iter(faults)

    async def __call__(self, _: Transport, method: str, path: str, **given: Any) -> httpx.Response:
        request = httpx.Request(method, f"http://server{path}")
        if method == "GET":
            names = [given["params"].get("tag", "").removeprefix("collected=")]
            names = names if "tag" in given["params"] else self.stored
            data = [{"run_id": name, "tags": {"collected": name}} for name in names if name in self.stored]
            return httpx.Response(200, json={"data": data, "has_more": False}, request=request)
        names = [tags["collected"] for tags in json.loads(given["content"])["capture"]["tags"]]
        count, status = next(self.faults, (len(names), 200))
        self.stored += names[:count]
        if not status:
            raise httpx.ReadError("lost", request=request)
        runs = [{"index": index, "status": "stored", "tokens": 3} for index in range(len(names))]
        body: dict[str, Any] = {"activations_meta": {"runs": runs}} if status == 200 else {"error": {"message": "no"}}
        return httpx.Response(status, json=body, request=request)


@pytest.mark.parametrize("status", [500, 503, 0])
@pytest.mark.parametrize("count", [0, 2, 4])
def test_no_run_is_stored_twice_where_an_answer_is_lost(
    count: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(_: float) -> None:
        pass

    server = FlakyServer([(count, status), (0, 429)])
    monkeypatch.setattr(Transport, "_exchange", lambda *args, **given: server(*args, **given))
    monkeypatch.setattr("vitrine.connection.transport._sleep", at_once)
    monkeypatch.setattr(remote, "pause_s", lambda attempt: 0.0)
    for stored in (4 - count, 0):  # a second command finds all
        found = collect(ROWS, session="s", points=["layers.0.output"], model="m", base_url="http://server")
        assert (found.runs, found.already_stored, found.failed) == (stored, 4 - stored, 0)
    assert len(server.stored) == len(set(server.stored)) == 4
