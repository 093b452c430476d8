"""A bad request gets OpenAI's error, which names the field."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from deployments.messages import Piece, Refusal
from serve_app.answers import Answer
from serve_app.http.errors import ApiError

CHAT = {"model": "vitrine-demo", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "calculator"}}

CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "half \ud800"})}}

BAD_CHATS = [
    ({"model": "nope"}, 404, "model"),
    ({"captrue": {"points": ["layers.1.output"]}}, 400, "captrue"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0]"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [CALLED]}]}, 400, "messages"),  # no text
    ({"messages": [{"role": "user", "content": "x", "mood": "sad"}]}, 400, "messages[0].mood"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": 9}, 400, "temperature"),
    ({"top_p": -1}, 400, "top_p"),
    ({"max_tokens": 5000}, 400, "max_tokens"),
    ({"max_tokens": 2.5}, 400, "max_tokens"),
    ({"n": 0}, 400, "n"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": 5}, 400, "stop"),
    ({"top_k": 10**40}, 400, "top_k"),
    ({"top_k": -2}, 400, "top_k"),
    ({"seed": 10**40}, 400, "seed"),
    ({"min_p": 1.5}, 400, "min_p"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"presence_penalty": -2.5}, 400, "presence_penalty"),
    ({"frequency_penalty": 3}, 400, "frequency_penalty"),
    ({"logit_bias": {"Tom": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
    ({"logit_bias": {str(id): 1 for id in range(1025)}}, 400, "logit_bias"),
    ({"min_tokens": -1}, 400, "min_tokens"),
    ({"min_tokens": 3}, 400, "min_tokens"),
    ({"stop_token_ids": [99999999]}, 400, "stop_token_ids"),
    ({"stop_token_ids": [3, -1]}, 400, "stop_token_ids[1]"),
    ({"stop_token_ids": list(range(257))}, 400, "stop_token_ids"),
    ({"logprobs": 3}, 400, "logprobs"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"max_completion_tokens": 5000}, 400, "max_completion_tokens"),
    ({"tools": [TOOL | {"type": "oven"}]}, 400, "tools[0].type"),
    ({"session_id": "../up"}, 400, "session_id"),
    ({"messages": [{"role": "user", "content": "over the edge " * 2000}]}, 400, "messages"),
    ({"capture": {"points": ["layers.99.output"]}}, 400, "capture.points[0]"),
    ({"capture": {"points": ["embed.output", "layers.1.outptu"]}}, 400, "capture.points[1]"),
    ({"capture": {"points": ["__class__.__mro__.output"]}}, 400, "capture.points[0]"),
    ({"capture": {"pints": []}}, 400, "capture.pints"),
    ({"capture": {"layers": [1], "sites": ["nothing.output"]}}, 400, "capture.sites[0]"),
    ({"capture": {"features": {"first": 10_000}}}, 400, "capture.features"),
    ({"capture": {"points": ["layers.*.output"], "return": "inline"}, "max_tokens": 2000}, 400, "capture.return"),
    ({"capture": {"tokens": {"last": 0}}}, 400, "capture.tokens.last"),
    ({"capture": {"features": {"first": 1, "index": [0]}}}, 400, "capture.features"),
]


@pytest.mark.parametrize(("changes", "status", "param"), BAD_CHATS, ids=[str(bad[2]) for bad in BAD_CHATS])
def test_a_bad_chat_is_refused_by_the_name_of_its_field(served, changes, status, param):
    answer = httpx.post(f"{served.base_url}/chat/completions", json=CHAT | changes, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert error["param"] == param, error
    assert error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_fields_at_openais_defaults_are_taken(served):
    neutral = {"n": None, "stream": None, "stop": None, "presence_penalty": 0, "frequency_penalty": 0.0}
    neutral |= {"logprobs": False, "logit_bias": {}, "response_format": {"type": "text"}, "tool_choice": "none"}
    neutral |= {"top_logprobs": 0, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0, "stop_token_ids": []}
    answer = httpx.post(f"{served.base_url}/chat/completions", json=CHAT | neutral, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("prompt", "param"), [([], "prompt"), ([[40], []], "prompt[1]")])
def test_an_empty_list_is_called_too_short_and_not_no_text(served, prompt, param):
    body = {"model": CHAT["model"], "prompt": prompt}
    error = httpx.post(f"{served.base_url}/completions", json=body, timeout=60).json()["error"]
    assert (error["param"], "at least 1 item" in error["message"]) == (param, True), error


def test_a_body_over_the_limit_without_a_length_gets_413(served):
    def endless():
        yield b'{"user": "'
        for _ in range(17):
            yield b"x" * (1 << 20)

    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{served.base_url}/chat/completions", content=endless(), headers=headers, timeout=60)
    assert answer.status_code == 413


def test_a_refusal_of_a_stream_that_has_begun_is_the_streams_last_event():
    refused = Refusal("it took too long", None, "timeout", 504)

    async def gathered():
        yield [Piece(0, "Tom")]
        yield [refused]

    async def sent() -> list[str]:
        answer = Answer("completion", "id", "vitrine-demo", sequences=1, per_prompt=1)
        return [event async for event in answer.stream(gathered(), [], usage=False, request_id="")]

    piece, last = [json.loads(event.removeprefix("data: ")) for event in asyncio.run(sent())]
    assert piece["choices"][0]["text"] == "Tom"
    assert last == ApiError.of(refused).body
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "timeout")
