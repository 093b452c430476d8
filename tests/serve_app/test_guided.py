"""Answers of a given form: JSON by a schema, forced calls, and variables of the chat template."""

from __future__ import annotations

import asyncio
import json

import httpx
import jsonschema
import pytest

from deployments.messages import End, Piece
from serve_app.answers import Answer

MODEL = "vitrine-demo"
QUESTION = {"role": "user", "content": "Tom has 3 boxes of 4 apples. How many apples does he have?"}
SCHEMA = {
    "type": "object",
    "properties": {"apples": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["apples", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CALCULATOR = tool("calculator", expression={"enum": ["3*4", "3+4"]})
CLOCK = tool("clock", zone={"enum": ["UTC"]})


def ask(client, **fields):
    fields = {"temperature": 0, "max_tokens": 96} | fields
    return client.chat.completions.create(model=MODEL, messages=[QUESTION], **fields)


def test_a_chat_answers_by_its_schema(client):
    for n, settings in enumerate(({}, {"temperature": 1.5, "seed": 1, "n": 3})):
        answer = ask(client, response_format=FORMAT, **settings)
        assert len(answer.choices) == (3 if n else 1)
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_json_object_is_one(client):
    choice = ask(client, response_format={"type": "json_object"}, temperature=1, seed=3, max_tokens=400).choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.startswith("{")


def test_a_completion_answers_by_its_schema(served):
    body = {"model": MODEL, "prompt": ["Tom", "Ann has 2"], "max_tokens": 96, "temperature": 0}
    body["response_format"] = FORMAT
    answer = httpx.post(f"{served.base_url}/completions", json=body, timeout=60).json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "calculator"}}])
def test_a_call_that_must_be_made_is_made(client, choice):
    for seed in range(3):
        fields = {"tools": [CALCULATOR], "tool_choice": choice, "parallel_tool_calls": False}
        answer = ask(client, temperature=1.5, seed=seed, **fields).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.function.name == "calculator"
        assert json.loads(call.function.arguments)["expression"] in ("3*4", "3+4")
        assert len((answer.message.content or "").splitlines()) <= 1, "at most a line is said before"


def test_the_arguments_of_a_call_are_streamed_as_they_are_written(client):
    saying = {"type": "string", "pattern": "^[a-z ]{60,80}$"}
    fields = {"tools": [tool("say", text=saying)], "tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(client, **fields, max_tokens=200).choices[0]
    assert whole.finish_reason == "tool_calls"
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **fields, max_tokens=200)]
    head, *pieces = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert (head.name, head.arguments) == ("say", "")
    assert len(pieces) > 4
    assert "".join(piece.arguments for piece in pieces) == whole.message.tool_calls[0].function.arguments
    assert len(json.loads("".join(piece.arguments for piece in pieces))["text"]) >= 60
    assert chunks[-1].finish_reason == "tool_calls"


NAMED = {"type": "function", "function": {"name": "oven"}}
BAD = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": FORMAT["json_schema"]}}, "response_format"),
    ({"response_format": FORMAT | {"json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": FORMAT | {"json_schema": {"name": "x", "schema": {"type": "spoon"}}}},
        "response_format",
    ),
    ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "perhaps", "tools": [CLOCK]}, "tool_choice"),
    ({"tool_choice": NAMED, "tools": [CLOCK]}, "tool_choice.function.name"),
    ({"tool_choice": "required", "tools": [tool("odd", x={"type": "spoon"})]}, "tools[0].function.parameters"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"x": "y" * 20_000}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": "thinking"}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("changes", "param"), BAD, ids=[f"{param}-{i}" for i, (_, param) in enumerate(BAD)])
def test_what_cannot_be_enforced_is_refused_by_its_field(served, changes, param):
    body = {"model": MODEL, "messages": [QUESTION], "max_tokens": 8}
    answer = httpx.post(f"{served.base_url}/chat/completions", json=body | changes, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_template_is_told_more_and_an_earlier_answers_thoughts_are_taken(client):
    messages = [QUESTION, {"role": "assistant", "content": "12", "reasoning_content": "3 * 4"}, QUESTION]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=4,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_thoughts_are_told_apart_from_content_whole_and_streamed():
    messages = [Piece(0, reasoning="Three "), Piece(0, "Twelve.", reasoning="fours."), End(Piece(0), "stop", 3, 9)]

    def answer():
        return Answer("chat", "id", MODEL, sequences=1, per_prompt=1)

    end = End(Piece(0, "Twelve.", reasoning="Three fours."), "stop", 3, 9)
    (whole,) = answer().whole([end])["choices"]
    assert whole["message"]["content"] == "Twelve."
    assert whole["message"]["reasoning_content"] == "Three fours."

    async def none():
        for nothing in ():
            yield nothing

    async def gathered():
        return [event async for event in answer().stream(none(), messages, usage=False, request_id="")]

    events = [json.loads(event.removeprefix("data: ")) for event in asyncio.run(gathered())[:-1]]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Three fours."
    assert "".join(delta.get("content", "") for delta in deltas) == "Twelve."
