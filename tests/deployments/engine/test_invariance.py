"""With `batch_invariant` a request gets the same bits alone and in any batch. Without it, it does not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from deployments.engine import sequence as sequence_module
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Sampling
from deployments.model.batch import PAGE
from deployments.model.model import Model
from deployments.model.packing import UnsupportedModelError
from deployments.points.interventions import Intervention
from deployments.points.patterns import Patterns

pytest.importorskip("ray")
from deployments.interventions.resolve import EditResolver
from deployments.interventions.stored_tensors import FetchedTensors

EXAMPLES = settings().max_examples // 6  # of schedules, for each model
POINTS = [
    "layers.*.output",
    "layers.*.attention.heads",
    "layers.*.attention.q",
    "layers.*.attention.k",
    "layers.*.attention.weights",
    "lm_head.output",
]
SIZES = {"hidden_size": 96, "intermediate_size": 200, "max_position_embeddings": 512}

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module", params=["qwen3-float32", "gpt2-float32", "mistral-bfloat16", "llama4-float32"])
def invariant(request, build, byte_tokenizer):
    architecture, dtype = request.param.split("-")
    sizes = {"gpt2": {}, "llama4": {**SIZES, "moe_layers": []}}.get(architecture, SIZES)
    hf = build(architecture, getattr(torch, dtype), **sizes)
    return Model(hf, byte_tokenizer, architecture, batch_invariant=True)


def requests(model, prompt, capturing, lengths):
    """Greedy and drawn ones, which record all they have and its likelihood."""
    common = [prompt(2 * PAGE)[: length // 2] for length in lengths]  # beginnings that they share
    made = []
    for i, (length, start) in enumerate(zip(lengths, common, strict=True)):
        ids = [*start, *prompt(length - len(start), i)]
        asked = capturing(model, str(i), ids, 5, points=POINTS, tokens="all" if i % 2 else "generated")
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
    lengths=st.lists(st.integers(1, 70), min_size=2, max_size=6),
    prefill_tokens=st.sampled_from([5, 17, 64, 1024]),
    max_running=st.integers(1, 8),
    pages=st.sampled_from([6, 8, 60]),
)
def test_any_company_gives_the_same_bits(invariant, prompt, capturing, lengths, prefill_tokens, max_running, pages):
    kv_bytes = pages * PAGE * KvMemory(invariant, 1, kv_bytes=1).position_bytes
    engine = Engine(invariant, prefill_tokens=prefill_tokens, max_running=max_running, kv_bytes=kv_bytes)
    assert not differing(invariant, requests(invariant, prompt, capturing, lengths), engine)


@pytest.mark.parametrize(
    ("batch_invariant", "dtype"), list(itertools.product((True, False), (torch.float32, torch.bfloat16)))
)
def test_long_contexts_give_the_same_bits_with_it_alone(
    batch_invariant, dtype, build, byte_tokenizer, prompt, capturing, two_threads, monkeypatch
):
    monkeypatch.setattr(sequence_module, "RESERVED_TOKENS", 1)
    sizes = {"hidden_size": 96, "intermediate_size": 200, "max_position_embeddings": 2048, "num_hidden_layers": 2}
    model = Model(build("qwen3", dtype, **sizes), byte_tokenizer, "qwen3", batch_invariant=batch_invariant)
    common = prompt(5 * PAGE)
    prompts = [[*common, *prompt(length - len(common), i)] for i, length in enumerate((150, 1500, 150))]
    shared_fields = {"vector": [1.0] * sizes["hidden_size"], "tokens": "generated"}
    changes = [
        {"op": "add", "point": "layers.0.output"},
        {"op": "add", "point": "layers.0.attention.output", "unit": "residual_norm"},
        {"op": "project_out", "point": "layers.1.output"},
    ]
    specs = TypeAdapter(list[Intervention]).validate_python([change | shared_fields for change in changes])
    fields = {f"interventions[{i}]": spec for i, spec in enumerate(specs)}
    resolver = EditResolver(model.points, model.device, fields, FetchedTensors({}, {}))
    asked = []
    for i, ids in enumerate(prompts):
        made = capturing(model, str(i), ids, 14, points=["layers.*.output", "lm_head.output"], tokens="generated")
        edits = resolver.of(fields, len(ids), len(ids) + 14, lambda: ("", []))
        asked.append(replace(made, ignore_eos=True, logprobs=2, edits=edits, prompt_logprobs=1 if i == 2 else None))
    shared = len(common) // PAGE  # by the second: the third is scored from its first row on
    pages = sum(-(-len(ids) // PAGE) for ids in prompts) - shared + 1  # less than all need at their ends
    kv_bytes = pages * PAGE * KvMemory(model, 1, kv_bytes=1).position_bytes
    engine = Engine(model, prefill_tokens=400, kv_bytes=kv_bytes)
    other = differing(model, asked, engine)
    assert engine.statistics.preempted
    assert engine.statistics.cached_tokens
    if not batch_invariant and not other:
        pytest.skip(f"this processor gives rows in {dtype} the same bits in these batches also without it")
    assert bool(other) is not batch_invariant


def test_a_layer_whose_attention_has_no_kernel_is_refused(build, byte_tokenizer):
    hf = build("qwen3", **SIZES)
    attention = hf.model.layers[1].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.register_forward_hook(lambda _, __, output: output.double())
    attention.o_proj.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    assert Model(hf, byte_tokenizer, "qwen3").packs
    with pytest.raises(UnsupportedModelError, match="attention kernel, which does not take torch.float64"):
        Model(hf, byte_tokenizer, "qwen3", batch_invariant=True)


class Unseen(torch.nn.Module):
    """An activation as a model's own code may have it."""

    def forward(self, x):
        return x * torch.sigmoid(x)


def test_a_model_that_does_not_keep_it_is_refused_at_its_load(build, byte_tokenizer):
    hf = build("qwen3", **SIZES | {"intermediate_size": 101})
    for layer in hf.model.layers:
        layer.mlp.act_fn = Unseen()
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM: its rows' bits depend"):
        Model(hf, byte_tokenizer, "qwen3", batch_invariant=True)


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
