"""Every route rejects unknown and malformed query parameters by their names."""

from __future__ import annotations

import re

import pytest

from deployments.errors import RequestError
from serve_app.routes.activations import tag_pairs
from tests.serve_app.described import DESCRIPTION, send

OPEN = {("get", "/health")}  # load balancers add parameters of their own
OPERATIONS = [
    (method, path)
    for path, operations in DESCRIPTION["paths"].items()
    for method in operations
    if (method, path) not in OPEN
]


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=" ".join)
def test_every_route_refuses_an_unknown_parameter_by_its_name(method, path):
    answer = send(method, re.sub(r"\{\w+(:path)?\}", "some", path) + "?surprise=1")
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"], error["type"]) == ("surprise", "unknown_field", "invalid_request_error")


@pytest.mark.parametrize(
    ("query", "param", "said"),
    [
        ("answer=1", "answer", "this route has after, limit, model, run, sample_id, session, since, tag, until"),
        ("limit=5&sesion=s", "sesion", "did you mean 'session'?"),
        ("Session=s", "Session", "did you mean 'session'?"),
        (f"{'x' * 5000}=1", "x" * 128, "this route has"),
    ],
    ids=["unknown", "misspelt", "other case", "endless"],
)
def test_the_message_has_the_nearest_name_and_all_that_there_are(query, param, said):
    answer = send("get", f"/v1/activations/runs?{query}")
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]
    assert len(answer.content) < 512


def test_no_route_and_a_wrong_method_are_told_before_their_queries():
    assert send("get", "/v1/nothing?surprise=1").status_code == 404
    assert send("put", "/v1/models?surprise=1").status_code == 405


def test_pages_for_browsers_take_any_query():
    assert send("get", "/docs?surprise=1").status_code == 200
    assert send("get", "/openapi.json?surprise=1").status_code == 200


@pytest.mark.parametrize("text", ["", "x", "=x"])
def test_a_tag_without_a_name_is_refused(text):
    with pytest.raises(RequestError, match="name=value"):
        tag_pairs(["a=b", text])
    assert tag_pairs(["a=b=c", "d="]) == (("a", "b=c"), ("d", ""))
