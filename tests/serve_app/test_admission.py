"""A full replica answers with OpenAI's error, and serves again when it has room."""

from __future__ import annotations

import httpx
import openai
import pytest

from deployments.options import Options

PLACES = Options().max_running + Options().max_queued
BODY = {"model": "vitrine-demo", "prompt": "Tom has", "max_tokens": 2}
MANY = BODY | {"n": 128, "prompt": ["Tom has"] * (PLACES // 128)}


def post(served, body, **more):
    return httpx.post(f"{served.base_url}/completions", json=body | more, timeout=120)


def test_a_full_server_answers_429_with_when_to_come_back(served):
    filling = MANY | {"max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.base_url}/completions", json=filling, timeout=120) as stream:
        assert stream.status_code == 200, stream.read()
        lines = stream.iter_lines()  # held: it would close the stream when it goes
        next(lines)  # its choices have their places
        for asked in ({}, {"stream": True}):
            refused = post(served, BODY, n=128, **asked)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "server_busy"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        with (
            openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client,
            pytest.raises(openai.RateLimitError),
        ):
            client.completions.create(**BODY, n=128)
    assert post(served, BODY, n=1).status_code == 200


def test_what_could_never_have_its_places_is_no_matter_of_waiting(served):
    refused = post(served, MANY, prompt=["Tom has"] * (PLACES // 128 + 1))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "n"
