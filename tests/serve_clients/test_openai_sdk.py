"""The `openai` package in all its usual ways: whole, streamed, parsed, with typed errors and retries."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from pydantic import BaseModel

from deployments.demo_model import PROBLEMS
from deployments.demo_model.calculator import answer_call
from deployments.options import Options

MODEL = "vitrine-demo"
QUESTIONS = [json.loads(line)["question"] for line in PROBLEMS.read_text().splitlines()[:8]]
POINTS = {"capture": {"points": ["layers.2.output"], "return": "inline", "features": {"first": 2}}}


class Calculator(BaseModel):
    """Evaluates an arithmetic expression."""

    expression: str


class Sum(BaseModel):
    total: int


CALCULATOR = openai.pydantic_function_tool(Calculator, name="calculator")


def chat(question=QUESTIONS[0], **fields):
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 48} | fields


def counts(usage):
    """How many tokens; how many of them were run before is another matter each time."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_answers_have_the_fields_of_openais_answers(client):
    answer = client.chat.completions.create(**chat())
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", MODEL, "chatcmpl-")
    assert {"system_fingerprint", "created", "usage"} <= answer.model_fields_set
    assert answer.usage.prompt_tokens_details.cached_tokens <= answer.usage.prompt_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_every_chunk_of_a_stream_with_usage_has_the_field_and_the_last_one_its_value(client):
    chunks = list(client.chat.completions.create(**chat(), stream=True, stream_options={"include_usage": True}))
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens > 0
    assert all("usage" not in chunk.model_fields_set for chunk in client.chat.completions.create(**chat(), stream=True))


def test_the_stream_helper_gathers_text_usage_and_activations(client):
    fields = chat(n=2, seed=1, temperature=1, max_tokens=512, extra_body=POINTS)
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    pieces = [event.delta for event in events if event.type == "content.delta"]
    assert sum(map(len, pieces)) == sum(len(choice.message.content) for choice in whole.choices)
    for streamed, choice in zip(final.choices, whole.choices, strict=True):
        assert streamed.message.content == choice.message.content
        assert streamed.finish_reason == choice.finish_reason
        assert streamed.message.run_id
    assert counts(final.usage) == counts(whole.usage)
    last = [event.chunk for event in events if event.type == "chunk"][-1]
    assert points(last) == points(whole)


def points(answer):
    """What was recorded, choice by choice; the package's own classes keep the field as they found it."""
    return [run["points"] for run in answer.activations_meta["runs"]]


def solve(step, turns=8):
    """Answer the model's calls until it makes none; every message goes back as the package gave it."""
    messages = [{"role": "user", "content": QUESTIONS[0] + "\n\nSolve it step by step. End with #### and the answer."}]
    asked = []
    for _ in range(turns):
        message = step(model=MODEL, messages=messages, tools=[CALCULATOR], temperature=0, max_tokens=128)
        messages.append(message)
        for call in message.tool_calls or ():
            asked.append(call.function.parsed_arguments.expression)
            result = answer_call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            return message.content, asked
    raise AssertionError(f"it still calls tools: {asked}")


def test_a_parsed_tool_loop_ends_with_the_answer(client):
    text, asked = solve(lambda **fields: client.chat.completions.parse(**fields).choices[0].message)
    assert asked
    assert text == f"#### {json.loads(PROBLEMS.read_text().splitlines()[0])['answer'].split('#### ')[1]}"


def test_a_streamed_tool_loop_is_the_parsed_one(client):
    def step(**fields):
        with client.chat.completions.stream(**fields) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            message = stream.get_final_completion().choices[0].message
        assert [event.arguments for event in done] == [call.function.arguments for call in message.tool_calls or ()]
        return message

    parsed = solve(lambda **fields: client.chat.completions.parse(**fields).choices[0].message)
    assert solve(step) == parsed


def test_a_parsed_answer_is_of_its_class(client):
    answer = client.chat.completions.parse(**chat(max_tokens=64), response_format=Sum)
    assert isinstance(answer.choices[0].message.parsed, Sum)


def test_a_parsed_answer_that_is_cut_raises_what_the_package_says(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**chat(max_tokens=1), response_format=Sum)


def test_messages_are_taken_as_clients_write_them(client):
    said = {"role": "assistant", "content": "36", "refusal": None, "annotations": [], "parsed": None}
    messages = [{"role": "user", "content": "3*12?", "type": "text"}, said, {"role": "user", "content": "4*12?"}]
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    usages = [client.chat.completions.create(**chat() | {"messages": m}).usage for m in (messages, plain)]
    assert counts(usages[0]) == counts(usages[1])


def test_completions_are_streamed_with_usage_like_whole_ones(client):
    fields = {"model": MODEL, "prompt": ["Tom has 3 boxes.", "Ann has"], "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**fields)
    texts, last = ["", ""], None
    for last in client.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        for choice in last.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert counts(last.usage) == counts(whole.usage)
    assert whole.choices[0].logprobs.tokens


def test_the_list_of_models_is_a_page_that_ends(client):
    page = client.models.list()
    assert [model.id for model in page] == [MODEL]
    assert not page.has_next_page()
    assert client.models.retrieve(page.data[0].id).created > 0


def test_raw_answers_say_their_type(client):
    raw = client.chat.completions.with_raw_response.create(**chat(max_tokens=1))
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().usage.completion_tokens == 1
    with client.chat.completions.with_streaming_response.create(**chat(max_tokens=1, stream=True)) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert list(streamed.iter_lines())[-2] == "data: [DONE]"


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"model": "nope"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"extra_body": {"captrue": {}}}, openai.BadRequestError, "captrue", "unknown_field"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_errors_are_typed_and_name_the_field(client, fields, kind, param, code, stream):
    with pytest.raises(kind) as raised:
        client.chat.completions.create(**chat(**fields), stream=stream)
    assert (raised.value.param, raised.value.code) == (param, code)
    assert raised.value.body["message"]


def test_a_client_that_times_out_is_told_so_and_its_request_ends(client, statistics, eventually):
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model=MODEL, prompt="Once", max_tokens=4000, timeout=0.5, extra_body={"ignore_eos": True}
        )
    eventually(statistics, lambda now: now["running"] == 0)


def test_a_client_that_is_refused_for_want_of_room_gets_its_answer_by_trying_again(
    served, client, statistics, eventually
):
    room = Options().max_running + Options().max_queued
    refused = threading.Event()

    def note(response):
        if response.status_code == 429:
            refused.set()

    async def fill_and_make_room():
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 3000, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=served.base_url, timeout=120) as http:
            counts = [128] * (room // 128) + [room % 128]
            requests = [asyncio.create_task(http.post("completions", json=body | {"n": n})) for n in counts if n]
            await asyncio.to_thread(eventually, statistics, lambda now: now["running"] + now["waiting"] == room)
            with pytest.raises(openai.RateLimitError) as told:
                await asyncio.to_thread(client.chat.completions.create, **chat())
            assert int(told.value.response.headers["retry-after"]) > 0
            hooks = openai.DefaultHttpxClient(event_hooks={"response": [note]})
            with client.with_options(max_retries=20, http_client=hooks) as patient, ThreadPoolExecutor(1) as thread:
                answer = thread.submit(patient.chat.completions.with_raw_response.create, **chat())
                assert await asyncio.to_thread(refused.wait, 60)
                for request in requests:
                    request.cancel()
                return await asyncio.wrap_future(answer)

    answer = asyncio.run(fill_and_make_room())
    assert answer.retries_taken > 0
    assert answer.parse().choices[0].message.content
