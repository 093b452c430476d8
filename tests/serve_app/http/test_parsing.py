"""An unknown field of a body is rejected with the nearest known name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.errors import LONGEST_NAME, RequestError, nearest
from serve_app.http.parsing import parsed
from serve_app.schemas.generation import ChatRequest
from serve_app.schemas.models import LoadRequest
from serve_app.schemas.presets import PresetBody

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
ADD = {"op": "add", "point": "norm.output"}


def refused(kind, body) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parsed(kind, json.dumps(body).encode())
    return caught.value


@pytest.mark.parametrize(
    ("kind", "body", "field", "near"),
    [
        (ChatRequest, CHAT | {"temprature": 1}, "temprature", "temperature"),
        (ChatRequest, CHAT | {"capture": {"tokns": "all"}}, "capture.tokns", "tokens"),
        (ChatRequest, CHAT | {"capture": {"retrn": "inline"}}, "capture.retrn", "return"),
        (ChatRequest, CHAT | {"messages": [{"role": "user", "contnt": "x"}]}, "messages[0].contnt", "content"),
        (ChatRequest, CHAT | {"interventions": [ADD | {"vectr": [1.0]}]}, "interventions[0].vectr", "vector"),
        (PresetBody, {"name": "p", "interventons": []}, "interventons", "interventions"),
        (LoadRequest, {"model_id": "m", "atention": "eager"}, "atention", "attention"),
    ],
)
def test_a_misspelt_field_gets_the_nearest_name(kind, body, field, near):
    error = refused(kind, body)
    assert (error.field, error.code) == (field, "unknown_field")
    assert error.message.endswith(f"did you mean {near!r}?")


def test_an_operation_suggests_no_field_of_another():
    error = refused(ChatRequest, CHAT | {"interventions": [{"op": "zero", "point": "norm.output", "vectr": [1.0]}]})
    assert error.message == "unknown field 'interventions[0].vectr'"


def test_a_name_like_no_other_gets_none():
    assert refused(ChatRequest, CHAT | {"qqq": 1}).message == "unknown field 'qqq'"


def test_a_long_name_is_compared_with_none():
    assert nearest("x" * LONGEST_NAME, ["x" * (LONGEST_NAME + 1)])
    assert not nearest("x" * (LONGEST_NAME + 1), ["x" * LONGEST_NAME])
