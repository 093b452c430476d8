"""If an answer is lost but its runs were stored, they are not stored again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from deployments.collect.examples import Example
from deployments.collect.remote import Collector, Server
from deployments.collect.settings import Settings

EXAMPLES = [Example(f"line {number}", str(number), f"text {number}", {}) for number in range(4)]


class FlakyServer:
    """Stores the prompts of each request, and fails as it is given; a number is how many of its runs it stores."""

    def __init__(self, faults: Iterable[int | tuple[int, int]]) -> None:
        self.stored: list[str] = []
        self.faults = iter(faults)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            name = request.url.params["tag"].removeprefix("collected=")
            return httpx.Response(200, json={"data": [{}] if name in self.stored else []})
        names = [tags["collected"] for tags in json.loads(request.content)["capture"]["tags"]]
        count, status = next(self.faults, (len(names), 200))
        self.stored += names[:count]
        if not status:
            raise httpx.ReadTimeout("late", request=request)
        runs = [{"index": index, "status": "stored", "tokens": 3} for index in range(len(names))]
        body: dict[str, Any] = {"activations_meta": {"runs": runs}} if status == 200 else {"error": {"message": "no"}}
        return httpx.Response(status, json=body)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 0])
@pytest.mark.parametrize("count", [0, 2, 4])
def test_no_run_is_stored_twice_where_an_answer_is_lost(
    count: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.collect.remote.PAUSE_S", 0.0)
    server = FlakyServer([(count, status), (0, 429)])
    client = httpx.Client(transport=httpx.MockTransport(server), base_url="http://server")
    settings = Settings(model="m", session="s", points=("layers.0.output",))
    outcome = Collector(Server(client), settings).collect(list(EXAMPLES))
    assert sorted(server.stored) == sorted(settings.name(example) for example in EXAMPLES)
    assert (outcome.runs, outcome.already_stored, outcome.failures) == (4 - count, count, [])
