"""Many streams at once: none is truncated, mixed with another, or out of order."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from deployments.demo_model import PROBLEMS

EACH = 4  # times that each request is asked
BODIES = [
    {
        "model": "vitrine-demo",
        "messages": [{"role": "user", "content": json.loads(line)["question"]}],
        "max_tokens": 8 + number % 17,
        "temperature": number % 2,
        "seed": number,
    }
    for number, line in enumerate(PROBLEMS.read_text().splitlines()[:50])
]
AS_STREAM = {"stream": True, "stream_options": {"include_usage": True}}


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    return (await http.post("chat/completions", json=body)).raise_for_status().json()


async def read(http: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Barrier) -> list[dict[str, Any]]:
    """The chunks of one stream, read on when all have begun."""
    async with http.stream("POST", "chat/completions", json=body | AS_STREAM) as answer:
        answer.raise_for_status()
        lines = answer.aiter_lines()
        first = await anext(lines)
        await begun.wait()
        events = [line.removeprefix("data: ") for line in [first, *[line async for line in lines]] if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


async def alone_and_together(
    base_url: str, bodies: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    streams = EACH * len(bodies)
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=None) as http:
        wholes = [await ask(http, body) for body in bodies]
        begun = asyncio.Barrier(streams)
        return wholes, await asyncio.gather(*(read(http, body, begun) for body in bodies * EACH))


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.long)])
def test_streams_at_once_say_what_each_request_says_alone(served, count):
    wholes, streams = asyncio.run(alone_and_together(served.base_url, BODIES[: count // EACH]))
    assert len({chunks[0]["id"] for chunks in streams}) == count
    for whole, chunks in zip(wholes * EACH, streams, strict=True):
        (choice,) = whole["choices"]
        said = [chunk["choices"][0] for chunk in chunks[:-1]]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert "".join(part["delta"].get("content") or "" for part in said) == choice["message"]["content"]
        assert [part["finish_reason"] for part in said] == [None] * (len(said) - 1) + [choice["finish_reason"]]
        assert chunks[-1]["choices"] == []
        counted, wanted = dict(chunks[-1]["usage"]), dict(whole["usage"])
        cached = counted.pop("prompt_tokens_details")["cached_tokens"]
        assert wanted.pop("prompt_tokens_details").keys() == {"cached_tokens"}
        assert 0 <= cached <= counted["prompt_tokens"]
        assert counted == wanted
