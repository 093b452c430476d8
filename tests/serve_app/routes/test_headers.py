"""Headers that name a session and tags, for clients whose bodies cannot be changed."""

from __future__ import annotations

import json

import openai
import pytest

MODEL = "vitrine-demo"
TAGS = {"task": "arithmetic", "try": "1"}
HEADERS = {"X-Vitrine-Session": "by-header", "X-Vitrine-Tags": json.dumps(TAGS)}


@pytest.fixture
def tagged(client):
    """The client of an agent whose loop knows nothing of Vitrine."""
    return client.with_options(default_headers=HEADERS)


def stored(client, run_id, session):
    runs = client.get(f"/activations/session/{session}", cast_to=object)["runs"]
    return next(run for run in runs if run["run_id"] == run_id)


def test_a_tool_loop_of_the_openai_package_is_recorded_by_its_headers_alone(client, tagged):
    function = {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}}
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 48, "tools": [{"type": "function", "function": function}]}
    messages = [{"role": "user", "content": "Ann has 3 boxes of 12 pens. How many pens is that?"}]
    for turn in range(2):
        choice = {"tool_choice": "required"} if turn == 0 else {}
        message = tagged.chat.completions.create(messages=messages, **asked, **choice).choices[0].message
        run = stored(client, message.run_id, "by-header")
        assert run["tags"] == TAGS
        results = [{"role": "tool", "tool_call_id": call.id, "content": "36"} for call in message.tool_calls or ()]
        messages += [message, *results]
    assert any(isinstance(said, dict) and said["role"] == "tool" for said in messages)


def test_completions_take_them_too_and_the_body_wins(client, tagged):
    capture = {"points": ["layers.1.output"], "tags": {"try": "2"}}
    given = {"capture": capture, "session_id": "by-body"}
    answer = tagged.completions.create(model=MODEL, prompt="Tom has", max_tokens=2, extra_body=given)
    run = stored(client, answer.choices[0].run_id, "by-body")
    assert run["tags"] == TAGS | {"try": "2"}
    answer = tagged.completions.create(
        model=MODEL, prompt="Tom has", max_tokens=2, extra_body={"store_activations": False}
    )
    assert not hasattr(answer, "activations_meta")


@pytest.mark.parametrize(
    ("name", "value"),
    [("X-Vitrine-Session", "../up"), ("X-Vitrine-Tags", "task=a"), ("X-Vitrine-Tags", '{"try": 1}')],
)
def test_a_header_that_says_nothing_is_refused_by_its_name(client, name, value):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="Tom has", extra_headers={name: value})
    assert refused.value.param == name
