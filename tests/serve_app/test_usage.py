"""Limits of requests and tokens a minute, for each owner of keys."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from types import SimpleNamespace

import httpx
import pytest

from deployments.messages import End, Piece
from deployments.options import Options
from serve_app.http.keys import Caller, Keys, Role
from serve_app.ingress import build_api

KEYS = Keys({sha256(name.encode()).digest(): Caller(Role.USE, name) for name in ("alice", "bob")})
BODY = {"model": "m", "prompt": "Tom has"}


class Backend:
    """Serves a model, whose answers have 30 prompt tokens and 12 generated ones."""

    def __init__(self):
        self.models = self.presets = self.restarted = self

    async def find(self, *_):
        return self

    async def chosen(self, *_):
        return None

    async def complete(self, *_):
        return [End(Piece(0, "text"), "stop", 30, 12)]

    async def stream(self, *_):
        yield [Piece(0, "te")]
        yield await self.complete()


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("serve_app.usage.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def asked(*requests, clock, **options):
    """The answers to requests, each of a key and a time."""
    api = build_api(Backend(), Options(**options), KEYS)

    async def answers():
        transport, found = httpx.ASGITransport(api), []
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for key, at, more in requests:
                clock[0] = at
                headers = {"Authorization": f"Bearer {key}"}
                found.append(await client.post("/v1/completions", json=BODY | more, headers=headers))
        return found

    return asyncio.run(answers())


def test_an_owner_who_has_used_up_the_requests_of_a_minute_is_told_when_to_come_back(clock):
    times = [("alice", 0), ("alice", 0), ("alice", 6), ("bob", 6), ("alice", 29), ("alice", 30)]
    answers = asked(*((*one, {}) for one in times), clock=clock, requests_per_minute=2)
    assert [answer.status_code for answer in answers] == [200, 200, 429, 200, 429, 200]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers[:3]] == ["1", "0", "0"]
    assert answers[2].headers["retry-after"] == "24"
    error = answers[2].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_counted_when_a_request_ends_and_the_debt_is_waited_for(clock, stream):
    times = [("alice", 0), ("alice", 0), ("alice", 0), ("alice", 23), ("bob", 23), ("alice", 24)]
    answers = asked(*((*one, {"stream": stream}) for one in times), clock=clock, tokens_per_minute=60)
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429, 200, 200]
    assert [answer.headers["x-ratelimit-remaining-tokens"] for answer in answers[:3]] == ["60", "18", "0"]
    assert answers[2].headers["retry-after"] == "24"
