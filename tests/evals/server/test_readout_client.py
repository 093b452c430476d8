"""What an evaluation asks of readouts, and what it refuses."""

from typing import Any

import pytest
from fake_openai import FakeServer

from evals.config import EvalError
from evals.server.readout_client import ReadoutValues, fields, installed, values_of

TRUTH = {"id": "1", "model": "fake/model", "kind": "linear", "point": "layers.1.output", "values": 1, "created": 1.5}


def test_of_a_readout_is_kept_what_tells_it_from_another(server: FakeServer) -> None:
    server.readouts = {"truth": TRUTH, "calm": TRUTH | {"labels": ["calm"]}}
    found = installed(server.base_url, "fake/model", ["truth", "calm"])
    assert found
    assert list(found) == ["truth", "calm"]
    assert (found["truth"]["id"], found["calm"]["labels"]) == ("1", ["calm"])
    assert "created" not in found["truth"]
    assert installed(server.base_url, "fake/model", []) is None


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({}, "has no readout of this name; GET /v1/readouts lists"),
        ({"truth": TRUTH | {"kind": "sae"}}, "an autoencoder's features are not scores"),
        ({"truth": TRUTH | {"model": "other"}}, "for the model other"),
    ],
)
def test_a_readout_that_scores_no_answer_is_refused(server: FakeServer, told: dict[str, Any], reason: str) -> None:
    server.readouts = told
    with pytest.raises(EvalError, match=reason):
        installed(server.base_url, "fake/model", ["truth"])


def test_a_request_asks_for_generated_tokens_with_their_texts_and_for_nothing_without_readouts() -> None:
    assert fields(["truth"]) == {"readouts": [{"name": "truth", "tokens": "generated"}], "logprobs": True}
    assert fields([]) == {}


def test_an_answer_without_readouts_has_no_readings_and_half_a_character_is_no_text() -> None:
    assert values_of({"message": {}}) is None
    choice = {
        "readouts": {"truth": {"generated": {"first": 0, "values": [[1.0]]}}, "empty": {}},
        "logprobs": {"content": [{"token": "\ud83d"}]},
    }
    assert values_of(choice) == ReadoutValues(tokens=["?"], values={"truth": [[1.0]], "empty": []})
