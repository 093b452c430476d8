"""Readouts over HTTP: installed, listed, used by whole and streamed answers, rejected by field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save

from deployments.activations import read_run
from tests.serve_app.completions import MODEL, POINT, WIDTH, post, refused

WEIGHT, BIAS = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1)) / 20, torch.tensor([0.1])
ABOUT = {"name": "truth", "model": MODEL, "point": POINT, "kind": "linear", "activation": "sigmoid"}
ABOUT["labels"] = '["yes"]'
GATED_TOO_EARLY = {"op": "zero", "point": "layers.1.output", "when": {"readout": "truth", "above": 0.5}}
GATED_BY_NO_PROBABILITY = {"op": "zero", "point": "layers.4.output", "when": {"readout": "truth", "below": -0.1}}
CAPTURE = {"points": [POINT], "return": "reference"}


def install(served, data: bytes, **spec: Any) -> httpx.Response:
    form = {"spec": json.dumps(spec)} if spec else None
    return httpx.post(f"{served.root}/v1/readouts", files={"file": ("r.safetensors", data)}, data=form, timeout=60)


def chunks(served, **fields: Any) -> list[dict[str, Any]]:
    lines = post(served, stream=True, **fields).text.split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.fixture(scope="module")
def truth(served):
    """A probe, as evals.probes writes it."""
    answer = install(served, save({"weight": WEIGHT, "bias": BIAS}, ABOUT))
    assert answer.status_code == 200, answer.text
    yield answer.json()
    assert httpx.delete(f"{served.root}/v1/readouts/truth", timeout=60).json()["deleted"]
    assert httpx.get(f"{served.root}/v1/readouts/truth", timeout=60).status_code == 404


@pytest.fixture(scope="module")
def sae(served):
    random = torch.Generator().manual_seed(2)
    tensors = {
        "W_enc": torch.randn(WIDTH, 64, generator=random) / 14,
        "W_dec": torch.randn(64, WIDTH, generator=random),
    }
    tensors |= {"b_enc": torch.zeros(64), "b_dec": torch.zeros(WIDTH)}
    spec = {"name": "sae", "model": MODEL, "point": POINT, "kind": "sae", "activation": "relu"}
    assert install(served, save(tensors), **spec).status_code == 200
    yield spec
    httpx.delete(f"{served.root}/v1/readouts/sae", timeout=60)


def test_a_readout_is_listed_and_shown(served, truth):
    assert truth["values"] == 1
    assert truth["hidden"] == WIDTH
    assert httpx.get(f"{served.root}/v1/readouts/truth", timeout=60).json() == truth
    assert truth in httpx.get(f"{served.root}/v1/readouts", timeout=60).json()["data"]
    again = install(served, save({"weight": WEIGHT, "bias": BIAS}, ABOUT))
    assert again.json() == truth, "the same one again is left as it is"
    sent = httpx.get(f"{served.root}/v1/readouts/truth/file", timeout=60)
    assert torch.equal(load_tensors(sent.content)["weight"], WEIGHT)
    assert len(sent.content) == truth["bytes"]


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_values_of_an_answer_are_the_probes_on_the_stored_rows_and_lie_with_them(served, truth, route):
    answer = post(served, route, readouts=["truth"], capture=CAPTURE).json()
    choice, usage = answer["choices"][0], answer["usage"]
    told = choice["readouts"]["truth"]
    assert told["labels"] == ["yes"]
    assert told["prompt"]["first"] == told["generated"]["first"] == 0
    values = torch.tensor(told["prompt"]["values"] + told["generated"]["values"])
    assert len(values) == usage["prompt_tokens"] + 8
    stored = read_run(answer["activations_meta"]["runs"][0]["run_id"])
    want = (stored[POINT].float() @ WEIGHT.T + BIAS).sigmoid()
    torch.testing.assert_close(values, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stored["readouts.truth"], want, rtol=1e-5, atol=1e-5)


def test_values_are_stored_without_a_point(served, truth):
    answer = post(served, readouts=[{"name": "truth", "store": True}]).json()
    told, (run,) = answer["choices"][0]["readouts"]["truth"], answer["activations_meta"]["runs"]
    stored = read_run(run["run_id"])
    assert list(run["points"]) == ["readouts.truth"]
    values = torch.tensor(told["prompt"]["values"] + told["generated"]["values"])
    torch.testing.assert_close(stored["readouts.truth"], values, rtol=1e-6, atol=1e-6)


def test_a_stream_carries_the_rows_computed_so_far(served, truth):
    whole = post(served, readouts=["truth"]).json()["choices"][0]["readouts"]["truth"]
    got = [
        choice["readouts"]["truth"]
        for chunk in chunks(served, readouts=["truth"])
        for choice in chunk["choices"]
        if "readouts" in choice
    ]
    for phase in ("prompt", "generated"):
        parts = [part[phase] for part in got if phase in part]
        assert [part["first"] for part in parts] == [
            sum(len(p["values"]) for p in parts[:i]) for i in range(len(parts))
        ]
        torch.testing.assert_close(
            torch.tensor([row for part in parts for row in part["values"]]),
            torch.tensor(whole[phase]["values"]),
            rtol=1e-4,
            atol=1e-4,
        )
    assert len(got) > 2


def test_features_come_with_their_numbers_and_one_of_them_is_changed(served, sae):
    asked = [{"name": "sae", "top_k": 3, "tokens": "generated"}]
    choice = post(served, readouts=asked).json()["choices"][0]
    rows = choice["readouts"]["sae"]["generated"]["values"]
    assert "prompt" not in choice["readouts"]["sae"]
    assert len(rows) == 8
    assert all(len(row) == 3 and row[0]["value"] >= row[1]["value"] >= row[2]["value"] > 0 for row in rows)
    feature = rows[0][2]["feature"]
    changed = post(
        served,
        readouts=asked,
        report=True,
        interventions=[{"op": "clamp", "sae": "sae", "feature": feature, "value": 40.0}],
    ).json()["choices"][0]
    (said,) = changed["report"]
    assert said["rows"] == len(rows) + said["rows"] - 8
    assert said["mean_change"] > 0
    assert changed["text"] != choice["text"]


def test_a_gate_says_its_lag_and_stop_when_ends_the_answer(served, truth):
    when = {"readout": "truth", "above": 1}
    steer = {"op": "scale", "point": "layers.4.output", "factor": 3.0, "when": when}
    plain = post(served, readouts=["truth"]).json()["choices"][0]
    shut = post(served, readouts=["truth"], interventions=[steer]).json()["choices"][0]
    assert shut["text"] == plain["text"]
    assert shut["report"] == [{"param": "interventions[0]", "point": "layers.4.output", "lag": 0}]
    early = steer | {"point": "layers.1.output", "tokens": "generated"}
    assert post(served, readouts=["truth"], interventions=[early]).json()["choices"][0]["report"][0]["lag"] == 1
    rows = plain["readouts"]["truth"]
    values = [rows["prompt"]["values"][-1][0], *(row[0] for row in rows["generated"]["values"])]
    largest = max(range(len(values) - 1), key=values.__getitem__)
    stop = {"readout": "truth", "above": values[largest] - 1e-4}
    for ended in (
        post(served, readouts=["truth"], stop_when=stop).json()["choices"][0],
        [c for chunk in chunks(served, readouts=["truth"], stop_when=stop) for c in chunk["choices"]][-1],
    ):
        assert ended["finish_reason"] == "stop"
        assert ended["stop_reason"]["readout"] == "truth"
        assert ended["stop_reason"]["token"] == len(rows["prompt"]["values"]) - 1 + largest


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"readouts": ["other"]}, "readouts[0].name"),
        ({"readouts": ["truth", "truth"]}, "readouts"),
        ({"readouts": [{"name": "truth", "top_k": 3}]}, "readouts[0].top_k"),
        ({"readouts": ["truth"], "stop_when": {"readout": "other", "above": 1}}, "stop_when.readout"),
        ({"stop_when": {"readout": "truth", "above": 1}}, "stop_when.readout"),
        ({"readouts": ["truth"], "stop_when": {"readout": "truth"}}, "stop_when"),
        ({"readouts": ["truth"], "stop_when": {"readout": "truth", "above": 1, "feature": 3}}, "stop_when.feature"),
        ({"readouts": ["truth"], "stop_when": {"readout": "truth", "above": 1.5}}, "stop_when.above"),
        ({"readouts": ["truth"], "interventions": [GATED_BY_NO_PROBABILITY]}, "interventions[0].when.below"),
        ({"interventions": [{"op": "zero", "sae": "none", "feature": 1}]}, "interventions[0].sae"),
        ({"readouts": ["truth"], "interventions": [GATED_TOO_EARLY]}, "interventions[0].when"),
    ],
)
def test_bad_fields_are_named(served, truth, fields, param):
    answer = post(served, **fields)
    assert refused(answer)[:2] == (400, param), answer.text


@pytest.mark.parametrize(
    ("data", "spec", "param"),
    [
        (b"nothing", {}, "file"),
        (save({"weight": torch.full((1, WIDTH), torch.nan)}, ABOUT | {"name": "bad"}), {}, "file"),
        (save({"weight": torch.ones(1, 7)}, ABOUT | {"name": "bad"}), {}, "spec.point"),
        (save({"weight": WEIGHT}, ABOUT), {"name": "bad", "point": "layers.99.output"}, "spec.point"),
        (save({"weight": WEIGHT * 2}, ABOUT), {}, "spec.name"),
        (save({"weight": WEIGHT}, ABOUT), {"name": "b/d"}, "spec.name"),
    ],
)
def test_a_bad_readout_is_refused_by_field_and_not_kept(served, truth, data, spec, param):
    answer = install(served, data, **spec)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    names = [one["name"] for one in httpx.get(f"{served.root}/v1/readouts", timeout=60).json()["data"]]
    assert "bad" not in names
