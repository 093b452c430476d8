"""Perplexities are the model's own, with features zeroed and without; intervals are over texts."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scoring_server import ScoringServer

from deployments.demo_model import WEIGHTS
from deployments.model.load import load
from deployments.model.model import Model
from evals.config import EvalError
from evals.outliers.ablation import LEAST_TEXTS, _compared, ablate, read_prompts
from evals.server.answers import RequestFailed

TEXTS = [f"Ann has {n} boxes of {n + 2} pens. How many pens is that?" for n in range(3, 6)]
POINTS = [f"layers.{layer}.input_layernorm.output" for layer in (0, 2)]


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)
    return load(str(WEIGHTS), dtype="float32", device="cpu")


@pytest.fixture
def server(model: Model) -> Iterator[ScoringServer]:
    with ScoringServer(model) as running:
        yield running


@torch.inference_mode()
def perplexity(model: Model, prompts: list[list[int]], zeroed: list[int]) -> float:
    """By plain forwards with hooks."""

    def zero(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(-1, torch.tensor(zeroed, dtype=torch.int64), 0.0)

    hooks = [model.hf.model.layers[layer].input_layernorm.register_forward_hook(zero) for layer in (0, 2)]
    nats, tokens = 0.0, 0
    for ids in prompts:
        logits = model.hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        nats += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        tokens += len(ids) - 1
    for hook in hooks:
        hook.remove()
    return math.exp(nats / tokens)


def test_perplexities_are_those_of_plain_forwards(model: Model, server: ScoringServer) -> None:
    ids = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    prompts = [*TEXTS[:2], ids[2]]
    found = ablate(server.base_url, "vitrine-demo", prompts, POINTS, [3, 5, 60], 192, seeds=2)
    assert found["base"]["perplexity"] == pytest.approx(perplexity(model, ids, []), rel=1e-3)
    assert found["outliers"]["perplexity"] == pytest.approx(perplexity(model, ids, [3, 5, 60]), rel=1e-3)
    each = [perplexity(model, ids, drawn) for drawn in found["drawn"]]
    assert found["random"]["each"] == pytest.approx(each, rel=1e-3)
    assert found["random"]["spread"] == pytest.approx(np.std(each, ddof=1), rel=0.1)
    assert found["tokens"] == sum(len(each) - 1 for each in ids)
    assert all(len({*drawn} - {3, 5, 60}) == 3 for drawn in found["drawn"])
    assert {body.preset for body in server.bodies} == {"none"}
    assert "3 texts" in found["no_interval"]
    assert found["outliers"]["more_nats_low"] is None


def test_what_a_server_refuses_is_told(server: ScoringServer) -> None:
    server.refusal = "no such point"
    with pytest.raises(RequestFailed, match="no such point"):
        ablate(server.base_url, "m", TEXTS, POINTS, [1], 192)


def test_more_outliers_than_other_features_are_refused() -> None:
    with pytest.raises(EvalError, match="3 of 5 features"):
        ablate("http://127.0.0.1:1/v1", "m", TEXTS, POINTS, [0, 1, 2], 5)


def test_intervals_hold_the_truth_as_often_as_they_claim() -> None:
    random = np.random.default_rng(1)
    hits, sessions = 0, 100
    for _ in range(sessions):
        tokens = random.integers(5, 50, 40)
        base = random.normal(2.0, 0.5, 40)  # nats a token of each text
        zeroed = base + random.normal(0.3, 0.2, 40)
        nats = np.stack([base, zeroed, base, base]) * tokens
        found = _compared(nats, tokens)["outliers"]
        hits += found["more_nats_low"] <= 0.3 <= found["more_nats_high"]
    assert 0.88 <= hits / sessions <= 0.99


def test_intervals_need_texts() -> None:
    for texts, is_none in ((LEAST_TEXTS - 1, True), (LEAST_TEXTS, False)):
        nats = np.random.default_rng(0).random((4, texts))
        assert (_compared(nats, np.ones(texts))["difference"]["more_nats_low"] is None) == is_none


def test_texts_are_lines_and_a_broken_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, [{"text": "a"}, {"prompt": "b"}, {"text": "c"}])))
    assert read_prompts(file, 2) == ["a", "b"]
    for broken in ('{"text": 3}', "{", "[]", '{"text": ""}'):
        file.write_text(f'{{"text": "a"}}\n\n{broken}\n')
        with pytest.raises(EvalError, match="texts.jsonl, line 3"):
            read_prompts(file, 9)
    file.write_text("\n")
    with pytest.raises(EvalError, match="no text"):
        read_prompts(file, 9)
