"""Presets: which are refused when they are stored, and what of them a request keeps."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from serve_app.schemas.presets import PresetBody, merged

ADD = {"op": "add", "point": "norm.output", "vector": [1.0]}


@pytest.mark.parametrize("tokens", ["last", "generated_last", {"last": 2}])
@pytest.mark.parametrize("field", ["interventions", "logit_lens"])
def test_a_preset_names_tokens_of_any_request(field, tokens):
    lens = {"layers": [0], "tokens": tokens}
    fields = {"interventions": [ADD | {"tokens": tokens}]} if field == "interventions" else {"logit_lens": lens}
    with pytest.raises(ValidationError) as refused:
        PresetBody.model_validate({"name": "p", **fields})
    assert refused.value.errors()[0]["type"] == "ambiguous_tokens"


CAPTURE = {"points": ["norm.output"]}
READ = {"name": "r", "store": True}


@pytest.mark.parametrize(
    ("below", "body", "by_default", "expected"),
    [
        ({"capture": CAPTURE}, {"store_activations": False}, False, {"store_activations": False}),
        ({"store_activations": False, "seed": 1}, {"capture": CAPTURE}, False, {"capture": CAPTURE, "seed": 1}),
        ({"capture": CAPTURE}, {}, True, {}),
        ({"capture": CAPTURE}, {"store_activations": True}, True, {"capture": CAPTURE, "store_activations": True}),
        ({"readouts": [READ]}, {}, True, {"readouts": [READ | {"store": False}]}),
        (
            {"interventions": [1], "seed": 1},
            {"interventions": [2], "seed": None},
            False,
            {"interventions": [1, 2], "seed": 1},
        ),
    ],
)
def test_a_bodys_fields_replace_those_below_them(below, body, by_default, expected):
    assert merged(below, body, by_default) == expected
