"""Parts of a logit add up to it, and each is the component's row along the direction of the final norm and head."""

from __future__ import annotations

import pytest
import torch

from deployments.errors import RequestError
from deployments.model.attribution import attribute
from deployments.model.references import by_hooks
from tests.deployments.conftest import HYBRID, SERVED

PROMPT, TARGETS = [5, 9, 77, 31, 200, 14], [50, 60]
# Norms, scales and caps of every kind: post-norms, LayerNorm with biases, parallel blocks, experts, a hybrid.
DIFFERENT = ("llama", "gpt2", "gemma2", "gemma3", "olmo2", "granite", "gpt_neox", "opt_norms_behind", "qwen3_moe")
UNSUPPORTED = "gemma4_shared"
ARCHITECTURES = [
    name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.long)
    for name in (SERVED | HYBRID).keys() - {UNSUPPORTED}
]


@pytest.mark.parametrize("name", sorted(ARCHITECTURES, key=str))
def test_parts_add_up_to_the_logit(tiny, name):
    model = tiny(name)
    with torch.inference_mode():
        logits = model.hf(input_ids=torch.tensor([PROMPT], device=model.device), use_cache=False).logits[0, -1]
    for by in ("layer", "head"):
        if (name, by) == ("mamba2", "head"):
            continue
        logit, parts = attribute(model, PROMPT, TARGETS, by)
        if name != "gemma2":  # whose logits have a soft cap
            assert logit == pytest.approx(float(logits[50] - logits[60]), abs=1e-5)
        assert sum(map(sum, parts.values())) == pytest.approx(logit, abs=1e-5)
    assert not any(weight.requires_grad for weight in model.hf.parameters())


def test_parts_are_rows_along_the_direction_of_the_token(tiny):
    model = tiny("llama")
    points = [model.points.named(name, "")[0] for name in ("layers.1.attention.heads", "layers.2.mlp.output")]
    (down,) = (point for point in model.points if point.name == "model.layers.2.mlp.down_proj.input")
    (last,) = model.points.named("norm.input", "")
    rows = by_hooks(model.hf, PROMPT, [*points, down, last])
    heads, mlp, neurons, stream = (rows[point.name][-1] for point in (*points, down, last))
    norm, layers = model.hf.model.norm, model.hf.model.layers
    head = model.hf.lm_head.weight
    direction = (head[50] - head[60]) * norm.weight / (stream.square().mean() + norm.variance_epsilon).sqrt()
    by_head, by_neuron = (attribute(model, PROMPT, TARGETS, by)[1] for by in ("head", "neuron"))
    assert by_head["layers.2.mlp"] == pytest.approx([float(mlp @ direction)], abs=1e-5)
    of_heads = heads * (direction @ layers[1].self_attn.o_proj.weight).view(heads.shape)
    torch.testing.assert_close(torch.tensor(by_head["layers.1.attention.heads"]), of_heads.sum(-1), atol=1e-5, rtol=0)
    of_neurons = neurons * (direction @ layers[2].mlp.down_proj.weight)
    torch.testing.assert_close(torch.tensor(by_neuron["layers.2.mlp.neurons"]), of_neurons, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "by", "message"),
    [
        ("qwen3_moe", "neuron", "no layer of this model has a point of neurons"),
        ("opt", "neuron", "no layer of this model has a point of neurons"),
        ("llama4", "neuron", "the parts add up to"),  # some MLPs have experts beside the neurons
        (UNSUPPORTED, "layer", "the parts add up to"),
    ],
)
def test_a_model_whose_parts_are_not_known_is_refused(tiny, name, by, message):
    with pytest.raises(RequestError, match=message):
        attribute(tiny(name), PROMPT, TARGETS, by)
