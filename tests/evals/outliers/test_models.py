"""What MoE models record at the input of their experts' block goes through the census as a dense model's does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from deployments.demo_model import WEIGHTS
from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.model.model import Model
from deployments.points.capture import Capture
from evals.outliers.census import census

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3MoeConfig": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("architecture", MODELS)
def test_the_census_finds_what_experts_read(tmp_path: Path, record: Callable[..., None], architecture: str) -> None:
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(WEIGHTS)
    sizes = {**SIZES, **MODELS[architecture], "vocab_size": len(tokenizer)}
    config = getattr(transformers, architecture)(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in hf.model.layers:  # what the router and the experts read has one large feature
        layer.post_attention_layernorm.weight.data[7] = 1000.0
    model = Model(hf, tokenizer, architecture)
    capture = Capture.model_validate({"points": ["layers.*.post_attention_layernorm.output"], "mode": "trace"})
    points = model.points.resolve(capture)
    ids = tokenizer("Ann has 3 boxes of 12 pens. How many pens is that?")["input_ids"]
    (done,) = Engine(model).generate([Request("0", ids, max_tokens=0, capture=capture, points=points)])
    assert done.captured
    record(tmp_path, {"run-0": done.captured.values})
    found = census(tmp_path, "s")
    assert (len(found["points"]), found["width"], found["tokens"]) == (3, 32, len(ids))
    assert [one["feature"] for one in found["features"]] == [7]
