"""`/openapi.json` describes the server: random requests by it, valid and nearly valid, get documented answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve_app.described import DESCRIPTION

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [found.ok() for found in schemathesis.openapi.from_dict(DESCRIPTION).get_all_operations()]
MODEL = "vitrine-demo"
EXAMPLES = settings().max_examples // 5  # requests to each route, fitting and not
NO_HTTP = "Invalid HTTP request received."  # the proxy's own answer to odd headers and addresses without end
FEW = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "min_tokens": 0, "n": 2}


def fields(operation) -> set[str]:
    """What an operation's body may hold; nothing where it is a file."""
    (media,) = DESCRIPTION["paths"][operation.path][operation.method]["requestBody"]["content"].values()
    name = media["schema"].get("$ref", "").rpartition("/")[2]
    return set(DESCRIPTION["components"]["schemas"][name]["properties"]) if name else set()


def answerable(operation, body: dict[str, Any]) -> dict[str, Any]:
    """The body, so changed that the model that is served takes it: that it answers is of interest, not at what length.

    What would load another model names the one that is there already: that runs through all but the load.
    """
    changes = {name: most for name, most in FEW.items() if body.get(name)}
    changes |= {name: value for name, value in {"model": MODEL, "max_tokens": 2}.items() if name in fields(operation)}
    if operation.path == "/models/load" and isinstance(body.get("model_id"), str):
        changes["model_id"] = MODEL
    if operation.path == "/detokenize" and are_whole(body.get("tokens")):
        changes["tokens"] = [int(token) % 1000 for token in body["tokens"]]
    if operation.path == "/v1/interventions":
        changes = {"default": False}  # another would change what all other tests are answered
    if operation.path in ("/tokenize", "/v1/model/attribution") and body.get("messages"):
        changes["prompt"] = None
    return body | changes


def are_whole(values: Any) -> bool:
    """Whether a schema takes them for token ids: JSON schema's integers have 1.0 and 10**30 among them."""
    return isinstance(values, list) and all(
        type(value) in (int, float) and value >= 0 and value == int(value) for value in values
    )


@pytest.fixture(scope="module")
def described(served):
    return httpx.get(f"{served.root}/openapi.json", timeout=60).json()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fitting", "not fitting"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_no_request_gets_a_5xx_or_what_is_not_documented(served, operation, mode):
    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def holds(case):
        if isinstance(case.body, dict):
            case.body = answerable(operation, case.body)
        answer = case.call(base_url=served.root, timeout=60)
        if answer.text != NO_HTTP:
            case.validate_response(answer, checks=CHECKS)

    try:
        holds()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # nothing that a request could do wrong


def operations(described):
    return [
        (f"{method} {path}", operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_route_has_an_example_of_each_answer(described):
    for name, operation in operations(described):
        for status, response in operation["responses"].items():
            assert response["description"], (name, status)
            for kind, media in response["content"].items():
                assert "example" in media, (name, status, kind)


def test_every_failure_is_documented_with_openais_body(described):
    for name, operation in operations(described):
        assert {"400", "413", "500", "503"} <= set(operation["responses"]), name
        assert "422" not in operation["responses"], name
        for status, response in operation["responses"].items():
            if status >= "400" and name != "get /health":
                (media,) = response["content"].values()
                assert media["schema"] == {"$ref": "#/components/schemas/ErrorBody"}, (name, status)
                assert media["example"]["error"]["message"], (name, status)


ASK_A_REPLICA = ["/v1/chat/completions", "/v1/completions", "/v1/models/{model_id}", "/tokenize", "/detokenize"]
ASK_A_REPLICA += ["/v1/model/structure", "/v1/model/attribution", "/v1/responses"]


@pytest.mark.parametrize("path", ASK_A_REPLICA)
def test_routes_that_ask_a_replica_say_that_none_may_answer_in_time(described, path):
    (operation,) = described["paths"][path].values()
    assert {"404", "503", "504"} <= set(operation["responses"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_routes_that_stream_say_so_and_their_examples_are_served(described, served, path):
    operation = described["paths"][path]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    for example in operation["requestBody"]["content"]["application/json"]["examples"].values():
        answer = httpx.post(served.root + path, json=example["value"], timeout=60)
        assert answer.status_code == 200, answer.text
        kind = "text/event-stream" if example["value"].get("stream") else "application/json"
        assert answer.headers["content-type"].startswith(kind)
