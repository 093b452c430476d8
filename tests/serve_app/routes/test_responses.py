"""OpenAI's Responses API, by the openai package."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

import serve_app.kept_responses as kept_responses
from deployments.accounts import Account
from deployments.messages import End, Piece, Refusal
from serve_app.http.errors import ApiError
from serve_app.kept_responses import KeptResponses
from serve_app.response_answers import ResponseAnswer
from serve_app.schemas.responses import ResponseRequest, messages_of
from tests.serve_app.described import post
from tests.serve_app.keyed import OWNERS

MODEL = "vitrine-demo"
QUESTION = "Tom has 3 boxes of 4 pens. How many pens is that?"
ASKED = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 48}
CALCULATOR = {
    "type": "function",
    "name": "calculator",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


def chat(client, messages, **fields):
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=48, **fields)
    return answer.choices[0].message, answer.usage


def test_a_response_is_the_chats_answer_in_openais_form(client):
    response = client.responses.create(**ASKED, instructions="Be brief.", metadata={"team": "a"}, tools=None, text=None)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    said, usage = chat(client, messages)
    assert response.output_text == said.content
    assert (response.status, response.error, response.id[:5]) == ("completed", None, "resp_")
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be brief.", {"team": "a"}, 48)
    counted = response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens
    assert counted == (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


def test_the_stream_helper_gathers_the_whole_response(client):
    fields = ASKED | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    begun, done = ["created", "in_progress"], ["output_text.done", "content_part.done", "output_item.done", "completed"]
    begun += ["output_item.added", "content_part.added"]
    assert kinds[:4] == [f"response.{kind}" for kind in begun]
    assert kinds[-4:] == [f"response.{kind}" for kind in done]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 2
    assert "".join(event.delta for event in deltas) == final.output_text == whole.output_text
    (part,), (expected,) = final.output[0].content, whole.output[0].content
    assert [entry.token for entry in part.logprobs] == [entry.token for entry in expected.logprobs]
    assert len(part.logprobs) == final.usage.output_tokens
    assert len(part.logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_function_call_goes_back_with_its_output(client, stream):
    fields = ASKED | {"tools": [CALCULATOR], "tool_choice": {"type": "function", "name": "calculator"}}
    if stream:
        with client.responses.stream(**fields) as events:
            response = events.get_final_response()
    else:
        response = client.responses.create(**fields)
    call = next(item for item in response.output if item.type == "function_call")
    assert "expression" in json.loads(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    answers = [
        client.responses.create(**ASKED | {"input": [{"role": "user", "content": QUESTION}, *response.output, output]}),
        client.responses.create(**ASKED | {"input": [output]}, previous_response_id=response.id),
    ]
    said = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": response.output_text, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "12"},
    ]
    expected, usage = chat(client, turns)
    assert {answer.output_text for answer in answers} == {expected.content}
    assert {answer.usage.input_tokens for answer in answers} == {usage.prompt_tokens}


def test_a_parsed_response_is_of_its_class_and_a_cut_one_is_incomplete(client):
    class Sum(BaseModel):
        total: int

    assert isinstance(client.responses.parse(**ASKED, text_format=Sum).output_parsed, Sum)
    cut = client.responses.create(**ASKED | {"max_output_tokens": 2})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.usage.output_tokens == 2
    last = list(client.responses.create(**ASKED | {"max_output_tokens": 2}, stream=True))[-1]
    assert (last.type, last.response.output_text) == ("response.incomplete", cut.output_text)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_vitrines_fields_are_a_chats(client, stream):
    own = {"capture": {"points": ["layers.2.output"], "return": "inline", "features": {"first": 2}}, "seed": 1}
    own |= {"logit_lens": {"layers": [-1]}, "return_token_ids": True}
    response = client.responses.create(**ASKED, extra_body=own, stream=stream)
    response = list(response)[-1].response if stream else response
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 48, "extra_body": own}
    answer = client.chat.completions.create(**fields, messages=[{"role": "user", "content": QUESTION}])
    (run,), (expected,) = response.activations_meta["runs"], answer.activations_meta["runs"]
    assert (run["points"], run["run_id"]) == (expected["points"], response.run_id)
    assert response.prompt_token_ids == answer.prompt_token_ids
    choice = answer.choices[0]
    assert (response.token_ids, response.logit_lens) == (choice.token_ids, choice.logit_lens)


def test_a_response_belongs_to_its_key(keyed):
    alice, bob = (openai.OpenAI(base_url=f"{keyed}/v1", api_key=OWNERS[name]) for name in ("alice", "bob"))
    with alice, bob:
        first = alice.responses.create(**ASKED)
        assert alice.responses.retrieve(first.id) == first
        second = alice.responses.create(**ASKED | {"input": "And 2 more?"}, previous_response_id=first.id)
        assert second.usage.input_tokens > first.usage.total_tokens
        for ask in (bob.responses.retrieve, bob.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            bob.responses.create(**ASKED, previous_response_id=first.id)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
        alice.responses.delete(first.id)
        gone = alice.responses.create(**ASKED, store=False).id
        for response_id in (first.id, gone):
            with pytest.raises(openai.NotFoundError):
                alice.responses.retrieve(response_id)
        assert alice.responses.create(**ASKED, previous_response_id=second.id).status == "completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(fields, param):
    error = post("/v1/responses", json.dumps(ASKED | fields).encode()).json()["error"]
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": QUESTION * 2000}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nope"}}}}, "text.format"),
    ],
)
def test_replicas_refusals_name_the_fields_of_a_response(client, fields, param):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**ASKED | fields, stream=stream)
        assert refused.value.param == param


def test_a_stream_that_breaks_fails_and_is_not_kept():
    answer = ResponseAnswer("1", ResponseRequest(model="m", input="x"), lambda _: pytest.fail("kept"))

    async def gathered():
        yield [Piece(0, reasoning="hm"), Piece(0, text="a"), Refusal("gone", None, "unavailable", 503)]

    async def sent():
        return [event async for event in answer.stream(gathered(), [], False, "r")]

    *_, failed, error, _ = "".join(asyncio.run(sent())).split("\n\n")
    failed, error = (json.loads(event.partition("\ndata: ")[2]) for event in (failed, error))
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (error["type"], error["message"], error["error"]["code"]) == ("error", "gone", "unavailable")


def test_an_empty_answer_is_a_message_so_that_templates_take_the_next_question():
    said = []
    answer = ResponseAnswer("1", ResponseRequest(model="m", input="x"), said.append)
    assert answer.whole([End(Piece(0), "stop", 1, 1)]) is said[0]
    assert messages_of(said[0]["output"]) == [{"role": "assistant", "content": ""}]


def test_few_responses_are_kept_and_the_oldest_of_the_owner_with_most_leave(monkeypatch):
    kept = KeptResponses()

    def hold(owner, *names, text=""):
        for name in names:
            kept.keep(owner, {"id": name}, [{"role": "user", "content": text}])

    def is_gone(name):
        with pytest.raises(ApiError, match=f"{name}.*restarts"):
            kept.get(Account(), name)

    monkeypatch.setattr(kept_responses, "MOST", 3)
    monkeypatch.setattr(kept_responses, "MOST_BYTES", 3000)
    hold("bob", "bobs")
    hold("ann", "first", "second")
    kept.get(Account(), "first")
    hold("ann", "third")
    is_gone("second")
    hold("ann", "large", text="x" * 1800)
    for name in ("first", "third"):
        is_gone(name)
    kept.get(Account("bob"), "bobs")
