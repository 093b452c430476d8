"""The cost of a body or query is bounded by its size, whatever it contains, and its first error is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jiter
import pytest
from pydantic import ValidationError

from serve_app.http.bodies import MOST_PARTS, parsed
from serve_app.http.errors import ApiError
from serve_app.schemas.generation import ChatRequest, CompletionRequest
from serve_app.schemas.models import DetokenizeRequest, LoadRequest
from tests.serve_app.described import DESCRIPTION, post, send

CHAT, COMPLETIONS, LOAD, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/models/load", "/detokenize"
KINDS = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, LOAD: LoadRequest, DETOKENIZE: DetokenizeRequest}
SAID: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
ASKED: dict[str, Any] = {"model": "m", "prompt": "x"}
MANY = 100_000
FEW = 5000  # objects, of which a body may have that many
NAMES = {f"k{i}": 1 for i in range(10_000)}
ADD = {"op": "add", "point": "embed.output", "vector": ["x"]}
FREE: dict[str, Any] = {"a": [1] * MANY}
ATTACKS = {
    "messages": (CHAT, SAID | {"messages": [1] * MANY}, "messages[0]"),
    "fitting messages": (CHAT, SAID | {"messages": SAID["messages"] * FEW}, "messages"),
    "parts": (CHAT, SAID | {"messages": [{"role": "user", "content": [1] * MANY}]}, "messages[0].content[0]"),
    "unknown fields": (CHAT, SAID | NAMES, "k0"),
    "unknown fields of a union": (CHAT, SAID | {"capture": {"tokens": NAMES}}, "capture.tokens"),
    "metadata": (CHAT, SAID | {"metadata": NAMES}, "metadata"),
    "prompts": (COMPLETIONS, ASKED | {"prompt": [[]] * FEW}, "prompt[0]"),
    "token ids": (COMPLETIONS, ASKED | {"prompt": [[1] * MANY + ["x"]]}, f"prompt[0][{MANY}]"),
    "vectors": (CHAT, SAID | {"interventions": [ADD] * 3000}, "interventions[0].vector[0]"),
    "parameters": (
        CHAT,
        SAID | {"tools": [{"type": "function", "function": {"name": "f", "parameters": FREE}}]},
        "tools[0].function.parameters",
    ),
    "device_map": (LOAD, {"model_id": "a/b", "device_map": dict.fromkeys(NAMES, "x")}, "device_map"),
    "a list": (CHAT, [{}] * FEW, None),
}
MALFORMED = {
    "a number of a million digits": (b'{"model": "m", "seed": ' + b"1" * 1_000_000 + b"}", None),
    "one of 4,000 digits": (b'{"model": "m", "prompt": "x", "seed": ' + b"1" * 4000 + b"}", "seed"),
    "1e400": (b'{"model": "m", "prompt": "x", "top_p": 1e400}', "top_p"),
    "NaN": (b'{"model": "m", "prompt": "x", "top_p": NaN}', "top_p"),
    "NaN in a free value": (b'{"model": "m", "prompt": "x", "response_format": {"type": "json_schema", '
                            b'"json_schema": {"name": "x", "schema": {"minimum": -1e400}}}}',
                            "response_format.json_schema.schema"),
    "a field twice": (b'{"model": "m", "prompt": "x", "prompt": "y"}', None),
    "a field twice in a free value": (b'{"model": "m", "prompt": "x", "metadata": {"a": "1", "a": "2"}}', None),
    "5,000 lists within each other": (b"[" * 5000 + b"]" * 5000, None),
    "a million brackets": (b"[" * 1_000_000, None),
    "nothing": (b"", None),
    "half of a surrogate pair": (rb'{"model": "m", "prompt": "\ud800"}', None),
    "UTF-16": (json.dumps(ASKED).encode("utf-16"), None),
    "no UTF-8": (b'{"model": "\xff"}', None),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), ATTACKS.values(), ids=ATTACKS)
def test_a_body_of_many_mistakes_makes_few_errors_and_tells_one(path, body, param):
    with pytest.raises(ValidationError) as caught:
        KINDS[path].model_validate(body)
    assert caught.value.error_count() <= 4  # one, or one for each branch of a union
    answer = post(path, json.dumps(body).encode())
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert len(answer.content) < 512


@pytest.mark.parametrize(("raw", "param"), MALFORMED.values(), ids=MALFORMED)
def test_odd_json_is_refused(raw, param):
    answer = post(COMPLETIONS, raw)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.content) < 512


JSON_ROUTES = [
    path
    for path, operations in DESCRIPTION["paths"].items()
    for operation in operations.values()
    if "application/json" in operation.get("requestBody", {}).get("content", {})
]


def test_every_json_body_is_read_in_the_same_way():
    assert {CHAT, COMPLETIONS, LOAD, DETOKENIZE, "/tokenize", "/models/unload", "/v1/interventions"} <= {*JSON_ROUTES}
    for path in JSON_ROUTES:
        answer = post(path, b'{"a": 1, "a": 2}')
        assert "duplicate key" in answer.json()["error"]["message"], path


CALL = {"id": "c", "function": {"name": "f", "arguments": ""}}
NESTED = {
    "lists": [[]] * MANY,
    "names": {f"k{i}": 1 for i in range(MANY)},
    "tool calls": SAID | {"messages": [{"role": "assistant", "tool_calls": [CALL] * 200}] * 20},
    "parts": SAID | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1000}] * 7},
    "annotations": SAID | {"messages": [SAID["messages"][0] | {"annotations": [{}] * 1000}] * 20},
    "quotes before them": ['\\"[', *[[]] * MANY],
}


@pytest.mark.parametrize("body", NESTED.values(), ids=NESTED)
def test_a_body_of_many_lists_objects_and_names_is_refused_before_it_is_parsed(monkeypatch, body):
    monkeypatch.setattr(jiter, "from_json", None)
    with pytest.raises(ApiError, match="20000 lists, objects and names"):
        parsed(json.dumps(body).encode())


@pytest.mark.parametrize("text", ["[{:", '"[', "\\[", '\\"[', "\u00e9\n:"])
def test_what_is_in_a_text_does_not_count(text):
    body = [text * MANY, *[[]] * (MOST_PARTS - 1)]
    assert parsed(json.dumps(body).encode()) == body
    with pytest.raises(ApiError, match="lists, objects and names"):
        parsed(json.dumps([*body, []]).encode())


def test_a_byte_order_mark_is_taken():
    assert parsed(json.dumps(ASKED).encode("utf-8-sig")) == ASKED


def unbounded(schema: Any, path: str) -> Iterator[str]:
    """Where a JSON schema allows a text, list, object or value of any size."""
    if "$ref" in schema:
        return
    for word in ("anyOf", "oneOf", "allOf"):
        for number, branch in enumerate(schema.get(word, ())):
            yield from unbounded(branch, f"{path}.{word}[{number}]")
    kind = schema.get("type")
    named = {"anyOf", "oneOf", "allOf", "enum", "const"} & set(schema)
    if kind is None and not named and "x-max-characters" not in schema:
        yield f"{path}: any value"
    is_file = schema.get("contentMediaType") == "application/octet-stream" or schema.get("format") == "binary"
    if kind == "string" and not (named or is_file or "maxLength" in schema or ends(schema.get("pattern", "*"))):
        yield f"{path}: text"
    if kind == "array":
        if "maxItems" not in schema:
            yield f"{path}: list"
        if "x-max-characters" not in schema:
            yield from unbounded(schema["items"], f"{path}[]")
    if kind == "object":
        for name, inner in schema.get("properties", {}).items():
            yield from unbounded(inner, f"{path}.{name}")
        yield from unbounded_names(schema, path)


def unbounded_names(schema: Any, path: str) -> Iterator[str]:
    others = schema.get("additionalProperties", True)
    if others is False or ("properties" in schema and "additionalProperties" not in schema):
        return
    if "maxProperties" not in schema or "maxLength" not in schema.get("propertyNames", {}):
        yield f"{path}: object"
    if others is not True:
        yield from unbounded(others, f"{path}{{}}")
    elif "x-max-characters" not in schema:
        yield f"{path}: values of an object"


def ends(pattern: str) -> bool:
    return pattern.startswith("^") and pattern.endswith("$") and not set("*+") & set(pattern)


def test_every_list_object_and_text_of_every_body_and_query_is_bounded():
    found: list[str] = []
    bodies_: set[str] = set()
    for path, operations in DESCRIPTION["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                found += unbounded(parameter["schema"], f"{method} {path} {parameter['name']}")
            for media in operation.get("requestBody", {}).get("content", {}).values():
                found += unbounded(media["schema"], f"{method} {path}")
                bodies_ |= references(media["schema"])
    seen: set[str] = set()
    while names := bodies_ - seen:
        for name in names:
            schema = DESCRIPTION["components"]["schemas"][name]
            found += unbounded(schema, name)
            bodies_ |= references(schema)
        seen |= names
    assert {"ChatRequest", "Capture", "JsonSchema", "LoadRequest", "DetokenizeRequest", "PresetBody"} <= seen
    assert found == []


def references(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(references, schema))
    if not isinstance(schema, dict):
        return set()
    own_ = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
    return own_.union(*map(references, schema.values()))


QUERIES = [
    ("runs", {"tag": [f"name{i}=value" for i in range(1000)]}, "tag"),
    ("sessions", {"tag": [f"name{i}=value" for i in range(1000)]}, "tag"),
    ("runs", {"tag": "name=" + "x" * 1000}, "tag[0]"),
    ("runs", {"model": "x" * 1000}, "model"),
    ("sessions", {"after": "x" * 1000}, "after"),
    ("runs", {"run": ["r"] * 2000}, "run"),
    ("runs", {"run": ",".join(["r"] * 2000)}, "run"),
    ("session/s", {"owner": "x" * 1000}, "owner"),
]


@pytest.mark.parametrize(("route", "query", "param"), QUERIES)
def test_a_query_of_too_much_is_refused_by_the_name_of_its_field(route, query, param):
    answer = send("GET", f"/v1/activations/{route}", params=query)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.content) < 1024


def test_a_large_body_is_answered_as_a_small_one(served):
    body = {"model": "vitrine-demo", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 4, "seed": 7}
    large = body | {"prediction": {"type": "content", "content": "x" * 200_000}}
    answers = [httpx.post(f"{served.base_url}/chat/completions", json=sent, timeout=60) for sent in (body, large)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    usages = [jiter.from_json(answer.content)["usage"]["total_tokens"] for answer in answers]
    assert usages[0] == usages[1]
