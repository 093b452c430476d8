"""Attention patterns over HTTP, of a server as it starts."""

from __future__ import annotations

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from deployments.activations import read_run
from deployments.demo_model import WEIGHTS
from deployments.options import DEMO

LAYERS, HEADS = 6, 4
POINT = "layers.2.attention.weights"


@pytest.fixture
def root(served):
    return served.root


def ask(root, **fields):
    body = {
        "model": DEMO,
        "prompt": "Tom has 3 boxes of 12 pens.",
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
    }
    return httpx.post(f"{root}/v1/completions", json=body | fields, timeout=120)


def recorded(root, **fields):
    answer = ask(root, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["activations_meta"]["runs"][0]


@pytest.fixture(scope="module")
def shown():
    """Transformers' own patterns of token ids: (ids) -> [heads, tokens, tokens] of each layer."""
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32, attn_implementation="eager")

    @torch.no_grad()
    def run(token_ids):
        return [layer[0] for layer in model(input_ids=token_ids.long()[None], output_attentions=True).attentions]

    return run


def test_stored_patterns_are_those_of_transformers(root, shown):
    run = recorded(root, capture={"points": ["layers.*.attention.weights"]}, session_id="patterns")
    stored = read_run(run["points"][POINT]["uri"], run_id=run["run_id"])
    tokens = run["tokens"]
    assert len(stored) == LAYERS
    for layer, want in enumerate(shown(stored.token_ids)):
        name = f"layers.{layer}.attention.weights"
        assert run["points"][name]["shape"] == [tokens, HEADS, None]
        assert run["points"][name]["dtype"] == "float32"
        for k, row in enumerate(stored[name]):
            torch.testing.assert_close(row, want[:, k, : k + 1], rtol=0, atol=1e-5)
        torch.testing.assert_close(stored[name].padded(), want.transpose(0, 1), rtol=0, atol=1e-5)
    listed = httpx.get(f"{root}/v1/activations/session/patterns", timeout=60).json()["runs"]
    (mine,) = [one for one in listed if one["run_id"] == run["run_id"]]
    assert mine["points"][POINT]["shape"] == [tokens, HEADS, None]


def test_inline_patterns_are_lists_that_grow(root):
    capture = {"points": [POINT], "tokens": {"last": 3}, "dtype": "bfloat16"}
    stored = recorded(root, capture=capture, session_id="inline-patterns")
    inline = recorded(root, capture=capture | {"return": "inline"})["points"][POINT]
    tokens = stored["tokens"]
    assert (inline["shape"], inline["dtype"]) == ([3, HEADS, None], "bfloat16")
    assert [[len(head) for head in row] for row in inline["data"]] == [[tokens - 2 + i] * HEADS for i in range(3)]
    rows = read_run(stored["points"][POINT]["uri"], run_id=stored["run_id"])[POINT]
    for row, read in zip(inline["data"], rows, strict=True):
        torch.testing.assert_close(torch.tensor(row), read.float(), rtol=0, atol=1e-2)


def test_the_structure_says_where_an_axis_grows(root):
    points = httpx.get(f"{root}/v1/model/structure", timeout=60).json()["points"]
    shapes = {point["name"]: point["shape"] for point in points if point["name"].endswith(".weights")}
    assert shapes == {f"layers.{i}.attention.weights": [HEADS, "tokens"] for i in range(LAYERS)}


def refused(answer):
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_what_patterns_cannot_have_or_be_is_refused_by_its_field(root):
    assert refused(ask(root, capture={"points": [POINT], "features": {"first": 3}}))[0] == "capture.features"
    every = {"points": ["layers.*.attention.weights"], "return": "inline"}
    param, message = refused(ask(root, prompt=[5] * 150, capture=every))
    tokens = 156
    assert param == "capture.return"
    assert str(LAYERS * HEADS * tokens * (tokens + 1) // 2) in message
    param, message = refused(ask(root, prompt=[5] * 3900, capture={"points": ["layers.*.attention.weights"]}, n=8))
    assert param == "capture"
    assert str(8 * 4 * LAYERS * HEADS * 3906 * 3907 // 2) in message
