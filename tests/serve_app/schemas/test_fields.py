"""Requests to the server show every field of the table of fields in docs/http.md."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple, get_args

import httpx
import pytest
import torch
from openai.types import completion_create_params as of_completions
from openai.types.chat import completion_create_params as of_chat
from safetensors.torch import save
from transformers import AutoTokenizer

from deployments.demo_model import WEIGHTS
from serve_app.schemas.generation import REFUSED_WITH_REASON, ChatRequest, CompletionRequest

DOCUMENT = Path(__file__).parents[3] / "docs" / "http.md"
GROUPS = re.findall(r"^\| (`[a-z_.`, ]+`) \| (\w+) \| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE)
ROWS = [(field, *said) for fields, *said in GROUPS for field in re.findall(r"[a-z_.]+", fields)]
ROUTES = ("chat", "completions")
REQUIRED = {"model", "messages", "prompt"}

MESSAGES = [{"role": "user", "content": "Tom has 3 boxes of 4 pens. How many pens is that?"}]
PLAIN: dict[str, Any] = {"model": "vitrine-demo", "max_tokens": 8, "temperature": 0}
BASE = {"chat": PLAIN | {"messages": MESSAGES}, "completions": PLAIN | {"prompt": "Tom has 3"}}
END = str(AutoTokenizer.from_pretrained(WEIGHTS).eos_token_id)
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


class Example(NamedTuple):
    """A value for a field, and what goes with it."""

    value: Any
    beside: dict[str, Any] = {}


DRAWN = {"temperature": 2, "seed": 7}
LONG = {"max_tokens": 48, "ignore_eos": True}
# Calls, one behind the other: the model may end, and would rather not.
CALLING = {"tools": [CLOCK], "tool_choice": "required", "logit_bias": {END: -100}, "max_tokens": 96}
EXAMPLES = {
    "model": Example("vitrine-demo"),
    "messages": Example(MESSAGES),
    "prompt": Example("Tom has 3"),
    "max_tokens": Example(3),
    "max_completion_tokens": Example(3),
    "temperature": Example(2, {"seed": 7}),
    "top_p": Example(0.01, DRAWN),
    "seed": Example(8, DRAWN),
    "presence_penalty": Example(2, LONG),
    "frequency_penalty": Example(2, LONG),
    "logit_bias": Example({"40": 100}),
    "n": Example(2),
    "stop": Example(" ", LONG),
    "logprobs": Example(True),
    "top_logprobs": Example(2, {"logprobs": True}),
    "stream": Example(True),
    "stream_options.include_usage": Example(True, {"stream": True}),
    "stream_options.include_obfuscation": Example(True, {"stream": True}),
    "tools": Example([TOOL]),
    "tool_choice": Example("required", {"tools": [TOOL], "max_tokens": 64}),
    "parallel_tool_calls": Example(False, CALLING),
    "response_format": Example({"type": "json_object"}),
    "user": Example("somebody"),
    "metadata": Example({"team": "a"}),
    "modalities": Example(["text"]),
    "prediction": Example({"type": "content", "content": "12"}),
    "prompt_cache_key": Example("k"),
    "prompt_cache_options": Example({"mode": "implicit"}),
    "prompt_cache_retention": Example("24h"),
    "reasoning_effort": Example("low"),
    "safety_identifier": Example("somebody"),
    "service_tier": Example("flex"),
    "store": Example(True),
    "verbosity": Example("low"),
    "audio": Example({"voice": "alloy", "format": "wav"}),
    "web_search_options": Example({}),
    "moderation": Example({"model": "omni-moderation-latest"}),
    "functions": Example([{"name": "calculator"}]),
    "function_call": Example("auto"),
    "best_of": Example(2),
    "echo": Example(True),
    "suffix": Example(" pens."),
    "top_k": Example(1, DRAWN),
    "min_p": Example(1, DRAWN),
    "repetition_penalty": Example(100, LONG),
    "min_tokens": Example(3, {"logit_bias": {END: 100}}),
    "stop_token_ids": Example([40], {"logit_bias": {"40": 100}}),
    "ignore_eos": Example(True, {"logit_bias": {END: 100}}),
    "return_token_ids": Example(True),
    "chat_template_kwargs": Example({"tone": "calm"}),
    "tool_call_format": Example("hermes"),
    "add_generation_prompt": Example(False),
    "continue_final_message": Example(True, {"messages": [*MESSAGES, {"role": "assistant", "content": "Tom has"}]}),
    "store_activations": Example(True),
    "capture": Example({"points": ["norm.output"]}),
    "interventions": Example([{"op": "zero", "point": "layers.1.output"}]),
    "variants": Example([[{"op": "zero", "point": "layers.1.output"}]]),
    "logit_lens": Example({"layers": [-1]}),
    "readouts": Example(["fields"]),
    "stop_when": Example({"readout": "fields", "above": -1e9}, {"readouts": ["fields"]}),
    "report": Example(True, {"interventions": [{"op": "zero", "point": "layers.1.output"}]}),
    "preset": Example("fields"),
    "intervention_profile": Example("fields"),
    "session_id": Example("fields", {"store_activations": True}),
}
OF_COMPLETIONS = EXAMPLES | {"logprobs": Example(2)}


@pytest.fixture(scope="module", autouse=True)
def _preset(served):
    """The one that the example names, and a readout."""
    probe = save({"weight": torch.ones(1, 192), "bias": torch.zeros(1)})
    spec = {"name": "fields", "model": "vitrine-demo", "point": "layers.3.output", "kind": "linear"}
    files, form = {"file": ("probe.safetensors", probe)}, {"spec": json.dumps(spec)}
    put = httpx.post(f"{served.root}/v1/readouts", files=files, data=form, timeout=60)
    assert put.status_code == 200, put.text
    preset = {"name": "fields", "interventions": EXAMPLES["interventions"].value}
    kept = httpx.post(f"{served.base_url}/interventions", json=preset, timeout=60)
    assert kept.status_code == 200, kept.text
    yield
    httpx.delete(f"{served.base_url}/interventions/fields", timeout=60)
    httpx.delete(f"{served.root}/v1/readouts/fields", timeout=60)


def post(served, route: str, body: dict[str, Any]) -> httpx.Response:
    path = "chat/completions" if route == "chat" else "completions"
    return httpx.post(f"{served.base_url}/{path}", json=body, timeout=60)


def content(answer: httpx.Response) -> str:
    """An answer without what differs from one request to the next."""
    assert answer.status_code == 200, answer.text
    return re.sub(r'"(id|created|run_id|uri|first_row|cached_tokens)": ?("[^"]*"|\d+)', "", answer.text)


@pytest.fixture(scope="module")
def answered(served):
    """`answered(route, body)`: the answer's content; each body is sent once."""

    @functools.cache
    def sent(route: str, body: str) -> str:
        return content(post(served, route, json.loads(body)))

    return lambda route, body: sent(route, json.dumps(body))


def example(route: str, field: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A body without the field, and one with it."""
    value, beside = (EXAMPLES if route == "chat" else OF_COMPLETIONS)[field]
    name, _, inner = field.partition(".")
    base = BASE[route] | beside
    return base, base | {name: {inner: value} if inner else value}


def rows(kind: str) -> list[tuple[str, str]]:
    return [(route, row[0]) for row in ROWS for route, said in zip(ROUTES, row[1:], strict=True) if said == kind]


def test_every_field_has_an_example_and_one_of_three_treatments():
    assert sorted(row[0] for row in ROWS) == sorted(EXAMPLES)
    assert {said for row in ROWS for said in row[1:]} == {"supported", "accepted", "refused"}


@pytest.mark.parametrize(("route", "schema"), [("chat", ChatRequest), ("completions", CompletionRequest)])
def test_every_field_that_the_server_takes_has_its_row(route, schema):
    taken = {field.partition(".")[0] for kind in ("supported", "accepted") for to, field in rows(kind) if to == route}
    assert taken == set(schema.model_fields) - set(REFUSED_WITH_REASON) - {"suffix"}


@pytest.mark.parametrize("params", [of_chat, of_completions])
def test_every_field_of_openais_client_has_its_row(params):
    fields = set(params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert fields <= {row[0].partition(".")[0] for row in ROWS}


# The model that ships has a template that is told nothing more, and that shows how calls are written: those of
# tests/deployments/chat/test_tool_formats.py are others.
UNSHOWN = {("chat", "chat_template_kwargs"), ("chat", "tool_call_format")}


@pytest.mark.parametrize(("route", "field"), [row for row in rows("supported") if row not in UNSHOWN])
def test_a_supported_field_changes_the_answer(served, answered, route, field):
    without, with_it = example(route, field)
    if field in REQUIRED:
        del without[field]
        assert post(served, route, without).json()["error"]["param"] == field
        content(post(served, route, with_it))
    else:
        assert content(post(served, route, with_it)) != answered(route, without)


def nullable() -> list[tuple[str, str]]:
    schemas = zip(ROUTES, (ChatRequest, CompletionRequest), strict=True)
    every = [
        (route, name, field.annotation) for route, schema in schemas for name, field in schema.model_fields.items()
    ]
    return [(route, name) for route, name, kind in every if kind is None or type(None) in get_args(kind)]


def changing(served, route: str, plain: dict[str, Any], fields: dict[str, Any]) -> list[str]:
    """Which of these fields change an answer: all in one request, and each by itself only if that differs."""
    plain = {name: value for name, value in plain.items() if name not in fields}
    expected = content(post(served, route, plain))
    if content(post(served, route, plain | fields)) == expected:
        return []
    return [name for name in fields if content(post(served, route, plain | {name: fields[name]})) != expected]


@pytest.mark.parametrize("route", ROUTES)
def test_null_is_the_same_as_leaving_a_field_out(served, route):
    plain = BASE[route] | {"seed": 7}
    fields = [field for to, field in nullable() if to == route]
    assert len(fields) > 20
    # One without its value, such as max_tokens, makes another answer: each by itself.
    assert [name for name in fields if name in plain and changing(served, route, plain, {name: None})] == []
    assert changing(served, route, plain, {name: None for name in fields if name not in plain}) == []


@pytest.mark.parametrize("route", ROUTES)
def test_accepted_fields_change_nothing(served, route):
    fields = [field for to, field in rows("accepted") if to == route]
    whole = {field: EXAMPLES[field].value for field in fields if "." not in field and not EXAMPLES[field].beside}
    assert changing(served, route, BASE[route], whole) == []
    for field in fields:
        if field not in whole:
            without, with_it = example(route, field)
            assert content(post(served, route, with_it)) == content(post(served, route, without)), field


@pytest.mark.parametrize(("route", "field"), rows("refused"))
def test_a_refused_field_is_refused_by_its_name(served, route, field):
    body = BASE[route] | {field: EXAMPLES[field].value}
    answer = post(served, route, body)
    assert answer.status_code == 400
    error = json.loads(answer.text)["error"]
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize("field", REFUSED_WITH_REASON)
def test_a_field_that_is_refused_says_why_and_may_be_null(served, field):
    answer = post(served, "chat", BASE["chat"] | {field: EXAMPLES[field].value})
    assert REFUSED_WITH_REASON[field] in answer.json()["error"]["message"]
    content(post(served, "chat", BASE["chat"] | {field: None}))
