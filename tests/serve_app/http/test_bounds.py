"""The cost of a body or query is bounded by its size, whatever it contains, and its first error is reported."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import threading
from array import array
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import httpx
import jiter
import pytest
from pydantic import ValidationError

from deployments.activations.index.database import index_path
from deployments.errors import RequestError
from serve_app.http import bodies
from serve_app.http.bodies import Bodies
from serve_app.http.errors import ApiError
from serve_app.http.parsing import parsed
from serve_app.schemas import base
from serve_app.schemas.generation import ChatRequest, CompletionRequest
from serve_app.schemas.models import LoadRequest
from serve_app.schemas.tokens import DetokenizeRequest
from tests.serve_app.described import APP, DESCRIPTION
from tests.waiting import wait_until

CHAT, COMPLETIONS, LOAD, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/models/load", "/detokenize"
KINDS = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, LOAD: LoadRequest, DETOKENIZE: DetokenizeRequest}
SAID: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
ASKED: dict[str, Any] = {"model": "m", "prompt": "x"}
MANY = 100_000
NAMES = {f"k{i}": 1 for i in range(MANY)}
ADD = {"op": "add", "point": "embed.output", "vector": ["x"]}
TOOL = {"type": "function", "function": {"name": "f"}}
FREE: dict[str, Any] = {"a": [1] * MANY}
ATTACKS = {
    "messages": (CHAT, SAID | {"messages": [1] * MANY}, "messages[0]"),
    "empty messages": (CHAT, SAID | {"messages": [{}] * MANY}, "messages"),
    "fitting messages": (CHAT, SAID | {"messages": SAID["messages"] * 5000}, "messages"),
    "parts": (CHAT, SAID | {"messages": [{"role": "user", "content": [1] * MANY}]}, "messages[0].content[0]"),
    "annotations": (
        CHAT,
        SAID | {"messages": [SAID["messages"][0] | {"annotations": [1] * MANY}]},
        "messages[0].annotations",
    ),
    "unknown fields": (CHAT, SAID | NAMES, "k0"),
    "unknown fields of a message": (CHAT, SAID | {"messages": [SAID["messages"][0] | NAMES]}, "messages[0].k0"),
    "unknown fields of a union": (CHAT, SAID | {"capture": {"tokens": NAMES}}, "capture.tokens"),
    "metadata": (CHAT, SAID | {"metadata": NAMES}, "metadata"),
    "logit_bias": (COMPLETIONS, ASKED | {"logit_bias": NAMES}, "logit_bias"),
    "logit_bias values": (COMPLETIONS, ASKED | {"logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}, "logit_bias"),
    "stop": (COMPLETIONS, ASKED | {"stop": [1] * MANY}, "stop[0]"),
    "prompts": (COMPLETIONS, ASKED | {"prompt": [[]] * MANY}, "prompt"),
    "texts": (COMPLETIONS, ASKED | {"prompt": ["x"] * MANY}, "prompt[0]"),
    "token ids": (COMPLETIONS, ASKED | {"prompt": [[1] * MANY + ["x"]]}, f"prompt[0][{MANY}]"),
    "large token ids": (COMPLETIONS, ASKED | {"prompt": [10**40] * MANY}, "prompt[0]"),
    "points": (CHAT, SAID | {"capture": {"points": [1] * MANY}}, "capture.points[0]"),
    "tags": (CHAT, SAID | {"capture": {"tags": NAMES}}, "capture.tags"),
    "interventions": (CHAT, SAID | {"interventions": [{}] * MANY}, "interventions"),
    "vectors": (CHAT, SAID | {"interventions": [ADD] * 4000}, "interventions[0].vector[0]"),
    "layers": (CHAT, SAID | {"logit_lens": {"layers": ["x"] * MANY}}, "logit_lens.layers[0]"),
    "tools": (CHAT, SAID | {"tools": [{}] * MANY}, "tools"),
    "fitting tools": (CHAT, SAID | {"tools": [TOOL] * 5000}, "tools"),
    "parameters": (
        CHAT,
        SAID | {"tools": [{"type": "function", "function": {"name": "f", "parameters": FREE}}]},
        "tools[0].function.parameters",
    ),
    "schema": (
        CHAT,
        SAID | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FREE}}},
        "response_format.json_schema.schema",
    ),
    "chat_template_kwargs": (CHAT, SAID | {"chat_template_kwargs": FREE}, "chat_template_kwargs"),
    "prediction": (CHAT, SAID | {"prediction": {"content": "x" * 300_000}}, "prediction"),
    "user": (CHAT, SAID | {"user": "x" * MANY}, "user"),
    "device_map": (LOAD, {"model_id": "a/b", "device_map": dict.fromkeys(NAMES, "x")}, "device_map"),
    "tokens": (DETOKENIZE, {"tokens": [-1] * MANY}, "tokens[0]"),
    "numbers of interventions": (
        CHAT,
        SAID | {"interventions": [{"op": "add", "point": "embed.output", "vector": [1] * (1 << 19)}] * 3},
        "interventions",
    ),
    "parameters of tools": (
        CHAT,
        SAID | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "x" * 250_000}}}] * 5},
        "tools",
    ),
    "a list": (CHAT, [{}] * MANY, None),
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
    "a million brackets": (b"[" * 1_000_000, None),
    "nothing": (b"", None),
    "UTF-16": (json.dumps(ASKED).encode("utf-16"), None),
    "no UTF-8": (b'{"model": "\xff"}', None),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """Time for the processes to start, which yield to all others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "LIMIT_S", 300.0)
        yield


@pytest.fixture(scope="module")
def shared_bodies() -> Iterator[Bodies]:
    """A reader of bodies whose processes read those of many tests."""
    shared = Bodies()
    yield shared
    shared.close()


@pytest.fixture
def app_bodies(shared_bodies: Bodies) -> None:
    """The app's reader of bodies."""
    APP.state.bodies = shared_bodies


@pytest.fixture
def fresh_bodies() -> Iterator[Bodies]:
    """The app's reader of bodies, which no other test has used."""
    fresh = APP.state.bodies = Bodies()
    yield fresh
    fresh.close()


def post(path: str, *contents: bytes, kind: str = "application/json") -> list[httpx.Response]:
    """The answers of an app that has no backend: of a body that fits, 500."""

    async def sent() -> list[httpx.Response]:
        transport = httpx.ASGITransport(APP, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            asked = (client.post(path, content=body, headers={"content-type": kind}) for body in contents)
            return await asyncio.gather(*asked)

    return asyncio.run(sent())


@pytest.mark.usefixtures("app_bodies")
@pytest.mark.parametrize(("path", "body", "param"), ATTACKS.values(), ids=ATTACKS)
def test_a_body_of_many_mistakes_makes_few_errors_and_tells_one(path, body, param):
    with pytest.raises(ValidationError) as caught:
        KINDS[path].model_validate(body)
    assert caught.value.error_count() <= 4  # one, or one for each branch of a union
    [answer] = post(path, json.dumps(body).encode())
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert len(answer.content) < 512


@pytest.mark.usefixtures("app_bodies")
@pytest.mark.parametrize(("raw", "param"), MALFORMED.values(), ids=MALFORMED)
def test_odd_json_is_refused(raw, param):
    [answer] = post(COMPLETIONS, raw)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.content) < 512


@pytest.mark.usefixtures("app_bodies")
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_that_a_page_may_send_unasked_is_refused_by_its_type(kind):
    [answer] = post(COMPLETIONS, json.dumps(ASKED).encode(), kind=kind)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Content-Type"


JSON_ROUTES = [
    path
    for path, operations in DESCRIPTION["paths"].items()
    for operation in operations.values()
    if "application/json" in operation.get("requestBody", {}).get("content", {})
]


@pytest.mark.usefixtures("app_bodies")
def test_every_json_body_is_read_in_the_same_way():
    assert {CHAT, COMPLETIONS, LOAD, DETOKENIZE, "/tokenize", "/models/unload", "/v1/interventions"} <= {*JSON_ROUTES}
    for path in JSON_ROUTES:
        [answer] = post(path, b'{"a": 1, "a": 2}')
        assert "duplicate key" in answer.json()["error"]["message"], path


TWO = [b"[" + b"[]," * 500_000 + b"[]]", json.dumps(ASKED | {"user": "x" * 200_000}).encode()]


@pytest.mark.parametrize("raw", TWO, ids=["lists", "text"])
def test_a_large_body_is_parsed_in_another_process(fresh_bodies, monkeypatch, raw):
    def here(*_: Any) -> None:
        raise AssertionError("it was parsed on the event loop")

    monkeypatch.setattr(bodies, "parsed", here)
    [answer] = post(COMPLETIONS, raw)
    assert answer.status_code == 400
    assert [process._process.pid != os.getpid() for process in fresh_bodies._idle] == [True]


def test_token_ids_come_from_the_other_process_as_an_array(fresh_bodies):
    ids = list(range(1 << 20))
    found = asyncio.run(fresh_bodies.read(CompletionRequest, json.dumps(ASKED | {"prompt": ids}).encode(), None))
    [prompt] = found.prompts
    assert isinstance(prompt, array)
    assert prompt.tolist() == ids


LARGE = json.dumps(SAID | {"messages": [{"role": "king", "content": "x" * 200_000}]}).encode()


def test_a_process_that_dies_fails_its_body_alone_and_is_replaced(fresh_bodies):
    assert [answer.status_code for answer in post(CHAT, LARGE)] == [400]
    os.kill(fresh_bodies._idle[0]._process.pid, signal.SIGKILL)
    assert [answer.status_code for answer in post(CHAT, LARGE)] == [503]
    assert [answer.status_code for answer in post(CHAT, LARGE)] == [400]


def test_a_body_that_takes_too_long_is_given_up_and_its_process_replaced(fresh_bodies, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(bodies, "LIMIT_S", 0.0)
        [answer] = post(CHAT, LARGE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
    assert fresh_bodies._idle == []
    assert [answer.status_code for answer in post(CHAT, LARGE)] == [400]


def test_a_body_that_takes_too_much_memory_is_too_large_and_the_next_is_read(fresh_bodies, monkeypatch):
    monkeypatch.setattr(bodies, "MOST_MEMORY", 256 << 20)
    [answer] = post(CHAT, b"[" + b"[]," * 4_000_000 + b"[]]")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert [answer.status_code for answer in post(CHAT, LARGE)] == [400]


def test_large_bodies_wait_for_a_process_and_too_many_are_refused(fresh_bodies, monkeypatch):
    monkeypatch.setattr(bodies, "MOST_WAITING", 2)
    statuses = [answer.status_code for answer in post(CHAT, *[LARGE] * 5, b"{}")]
    assert sorted(statuses) == [400, 400, 400, 400, 429, 429]
    assert len(fresh_bodies._idle) <= bodies.PROCESSES


class Held:
    """A process that reads a body once it may; says whose it began."""

    def __init__(self, began: list[bytes], may: threading.Event) -> None:
        self.began, self.may = began, may

    def parsed(self, _: Any, raw: bytes, __: Any) -> CompletionRequest:
        self.began.append(raw[-1:])
        assert self.may.wait(60)
        return CompletionRequest(model="m", prompt="x")

    def end(self) -> None: ...

    def close(self) -> None: ...


def test_an_owner_has_one_body_in_work_and_others_pass_those_that_wait(fresh_bodies, monkeypatch):
    began: list[bytes] = []
    may = threading.Event()
    monkeypatch.setattr(bodies, "_Process", lambda: Held(began, may))
    large = b" " * (bodies.MOST_AT_ONCE + 1)

    async def asked() -> list[Any]:
        read = [fresh_bodies.read(CompletionRequest, large + b"a", "a") for _ in range(bodies.MOST_WAITING + 2)]
        tasks = [asyncio.create_task(one) for one in (*read, fresh_bodies.read(CompletionRequest, large + b"b", "b"))]
        await wait_until(lambda: len(began) == 2)
        may.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    *many, other = asyncio.run(asked())
    assert sorted(began[:2]) == [b"a", b"b"]
    assert isinstance(other, CompletionRequest)
    refused = [found for found in many if isinstance(found, ApiError)]
    assert [error.status for error in refused] == [429]
    assert len(fresh_bodies._waiting) == len(fresh_bodies._turns) == 0


CALL = {"id": "c", "function": {"name": "f", "arguments": ""}}
NESTED = {
    "tool calls": SAID | {"messages": [{"role": "assistant", "tool_calls": [CALL] * 200}] * 30},
    "parts": SAID | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1000}] * 11},
    "annotations": SAID | {"messages": [SAID["messages"][0] | {"annotations": [{}] * 1000}] * 11},
}


@pytest.mark.parametrize("body", NESTED.values(), ids=NESTED)
def test_lists_and_objects_of_a_whole_body_are_bounded_before_any_becomes_a_model(monkeypatch, body):
    ChatRequest.model_validate(body)
    monkeypatch.setattr(ChatRequest, "model_validate", None)
    with pytest.raises(RequestError, match="10000 lists and objects") as caught:
        parsed(ChatRequest, json.dumps(body).encode())
    assert caught.value.field == "messages"


def test_brackets_in_a_text_are_no_lists():
    assert parsed(CompletionRequest, json.dumps(ASKED | {"prompt": "[{" * MANY}).encode()).prompt == "[{" * MANY


def test_a_free_list_is_measured_once_and_what_is_unread_is_dropped(monkeypatch):
    measured: list[Any] = []
    counting = SimpleNamespace(encode=lambda value: measured.append(value) or json.dumps(value))
    monkeypatch.setattr(base, "JSON", counting)
    message = SAID["messages"][0] | {"annotations": [1] * 1000, "activation_files": {"p": "f"}}
    found = parsed(ChatRequest, json.dumps(SAID | {"messages": [message], "prediction": {"a": [1]}}).encode())
    assert sorted(map(type, measured), key=str) == [dict, list]
    assert (found.messages[0].annotations, found.messages[0].activation_files, found.prediction) == (None, None, None)


def test_half_of_a_surrogate_pair_is_named_by_its_path_without_measuring_again(monkeypatch):
    measured: list[Any] = []
    encode = base.JSON.encode
    monkeypatch.setattr(base, "JSON", SimpleNamespace(encode=lambda value: measured.append(1) or encode(value)))
    with pytest.raises(RequestError) as caught:
        parsed(ChatRequest, json.dumps(SAID | {"prediction": {"a": [[1, {"b": "\ud800"}], 1]}}).encode())
    assert caught.value.field == "prediction.a[0][1].b"
    assert measured == [1]


def test_a_byte_order_mark_is_taken_and_other_encodings_are_told_to_be_utf_8():
    text = json.dumps(ASKED)
    assert parsed(CompletionRequest, text.encode("utf-8-sig")).prompt == "x"
    for encoding in ("utf-16", "utf-16-le", "utf-32-be"):
        with pytest.raises(RequestError, match="send UTF-8"):
            parsed(CompletionRequest, text.encode(encoding))


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
    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://127.0.0.1") as client:
            return await client.get(f"/v1/activations/{route}", params=query)

    answer = asyncio.run(asked())
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.content) < 1024


def test_a_thousand_tags_leave_the_index_on_its_disk(served):
    tags = {"tag": [f"name{i}=value" for i in range(1000)]}
    for route in ("runs", "sessions"):
        assert httpx.get(f"{served.base_url}/activations/{route}", params=tags, timeout=60).status_code == 400
    body = {"model": "vitrine-demo", "prompt": "Tom has", "max_tokens": 1, "session_id": "after-tags"}
    answer = httpx.post(f"{served.base_url}/completions", json=body | {"store_activations": True}, timeout=60)
    [run] = answer.json()["activations_meta"]["runs"]
    with closing(sqlite3.connect(index_path(served.home / "activations"))) as database:
        found = database.execute("SELECT session FROM runs WHERE run_id = ?", (run["run_id"],)).fetchall()
    assert found == [("after-tags",)]


def test_a_large_body_is_answered_as_a_small_one(served):
    body = {"model": "vitrine-demo", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 4, "seed": 7}
    large = body | {"prediction": {"type": "content", "content": "x" * 200_000}}
    answers = [httpx.post(f"{served.base_url}/chat/completions", json=sent, timeout=60) for sent in (body, large)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    usages = [jiter.from_json(answer.content)["usage"]["total_tokens"] for answer in answers]
    assert usages[0] == usages[1]
