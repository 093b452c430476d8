"""With `batch_invariant` a request gets the same bits alone and in any batch. Without it, it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Sampling
from deployments.model.kv_cache import PAGE
from deployments.model.model import Model
from deployments.model.packing import UnsupportedModelError
from deployments.points.patterns import Patterns

EXAMPLES = settings().max_examples // 4  # of schedules, for each model
POINTS = ["layers.*.output", "layers.*.attention.heads", "layers.*.attention.weights", "lm_head.output"]
SIZES = {"hidden_size": 96, "intermediate_size": 200, "max_position_embeddings": 512}


@pytest.fixture(scope="module", params=["qwen3-float32", "qwen3-bfloat16", "gpt2-float32", "mistral-float32"])
def invariant(request, build, byte_tokenizer):
    architecture, dtype = request.param.split("-")
    sizes = {} if architecture == "gpt2" else SIZES
    hf = build(architecture, getattr(torch, dtype), **sizes)
    return Model(hf, byte_tokenizer, architecture, batch_invariant=True)


def requests(model, prompt, capturing, lengths):
    """Greedy and drawn ones, which record all they have and its likelihood."""
    common = [prompt(2 * PAGE)[: length // 2] for length in lengths]  # beginnings that they share
    made = []
    for i, (length, start) in enumerate(zip(lengths, common, strict=True)):
        ids = [*start, *prompt(length - len(start), i)]
        asked = capturing(model, str(i), ids, 8, points=POINTS, tokens="all" if i % 2 else "generated")
        made.append(replace(asked, sampling=Sampling(float(i % 3), seed=i), logprobs=3, ignore_eos=True))
    return made


def bits(done):
    values = done.captured.values.items()
    flat = {name: value.values if isinstance(value, Patterns) else value for name, value in values}
    return list(done.tokens), {name: value.view(torch.uint8) for name, value in flat.items()}


def differing(model, asked, engine):
    """Which requests have other bits in company than alone."""
    together = [bits(done) for done in engine.generate(asked)]
    alone = [bits(Engine(model).generate([request])[0]) for request in asked]
    return [
        request.id
        for request, (tokens, values), (own, want) in zip(asked, together, alone, strict=True)
        if tokens != own or any(not torch.equal(values[name], want[name]) for name in want)
    ]


@settings(max_examples=EXAMPLES)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=2, max_size=8),
    prefill_tokens=st.sampled_from([5, 17, 64, 1024]),
    max_running=st.integers(1, 8),
    pages=st.sampled_from([6, 8, 60]),
)
def test_any_company_gives_the_same_bits(invariant, prompt, capturing, lengths, prefill_tokens, max_running, pages):
    kv_bytes = pages * PAGE * KvMemory(invariant, 1, kv_bytes=1).position_bytes
    engine = Engine(invariant, prefill_tokens=prefill_tokens, max_running=max_running, kv_bytes=kv_bytes)
    assert not differing(invariant, requests(invariant, prompt, capturing, lengths), engine)


def test_without_it_bits_differ(build, byte_tokenizer, prompt, capturing):
    model = Model(build("qwen3", **SIZES), byte_tokenizer, "qwen3")
    asked = requests(model, prompt, capturing, [3, 60, 17, 40, 9, 33, 21, 50])
    assert differing(model, asked, Engine(model, prefill_tokens=64))


@pytest.mark.parametrize(
    ("architecture", "dtype", "reason"),
    [
        ("qwen3_moe", torch.float32, "experts"),
        ("falcon_parallel", torch.float32, "share forwards"),
        ("llama", torch.float16, "attention kernel"),
    ],
)
def test_where_it_cannot_hold_it_is_refused(architecture, dtype, reason, build, byte_tokenizer):
    with pytest.raises(UnsupportedModelError, match=reason):
        Model(build(architecture, dtype), byte_tokenizer, architecture, batch_invariant=True)
