"""An unknown field of a body is rejected with the nearest known name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.errors import LONGEST_NAME, nearest
from tests.serve_app.described import post

CHATS, PROFILES, LOAD = "/v1/chat/completions", "/v1/interventions", "/models/load"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
ADD = {"op": "add", "point": "norm.output"}


def refused(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return post(path, json.dumps(body).encode()).json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "field", "near"),
    [
        (CHATS, CHAT | {"temprature": 1}, "temprature", "temperature"),
        (CHATS, CHAT | {"capture": {"tokns": "all"}}, "capture.tokns", "tokens"),
        (CHATS, CHAT | {"capture": {"retrn": "inline"}}, "capture.retrn", "return"),
        (CHATS, CHAT | {"messages": [{"role": "user", "contnt": "x"}]}, "messages[0].contnt", "content"),
        (CHATS, CHAT | {"interventions": [ADD | {"vectr": [1.0]}]}, "interventions[0].vectr", "vector"),
        (PROFILES, {"name": "p", "interventons": []}, "interventons", "interventions"),
        (LOAD, {"model_id": "m", "atention": "eager"}, "atention", "attention"),
    ],
)
def test_a_misspelt_field_gets_the_nearest_name(path, body, field, near):
    error = refused(path, body)
    assert (error["param"], error["code"]) == (field, "unknown_field")
    assert error["message"].endswith(f"did you mean {near!r}?")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"interventions": [{"op": "zero", "point": "norm.output", "vectr": [1.0]}]}, "interventions[0].vectr"),
        ({"interventions": [ADD | {"value": 2.0}]}, "interventions[0].value"),
        ({"interventions": [{"op": "zero", "sae": "s", "feature": 1, "valu": 2.0}]}, "interventions[0].valu"),
        ({"function": []}, "function"),
    ],
)
def test_a_name_that_would_be_refused_is_not_suggested(body, field):
    assert refused(CHATS, CHAT | body)["message"] == f"unknown field {field!r}"


def test_a_name_like_no_other_gets_none():
    assert refused(CHATS, CHAT | {"qqq": 1})["message"] == "unknown field 'qqq'"


def test_a_long_name_is_compared_with_none():
    assert nearest("x" * LONGEST_NAME, ["x" * (LONGEST_NAME + 1)])
    assert not nearest("x" * (LONGEST_NAME + 1), ["x" * LONGEST_NAME])
