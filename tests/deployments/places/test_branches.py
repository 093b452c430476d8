"""Names of what attention and the MLP add to the residual stream mean that, or are refused with the reason."""

from __future__ import annotations

import re

import pytest
import torch

from deployments.errors import RequestError
from deployments.places.points import Points
from deployments.places.watching import watch
from deployments.points.capture import Capture
from tests.deployments.model.architectures import built
from vitrine.points import TRANSFORMER_LENS

# Architecture -> the factor of what its branches add, one after the other.
SEQUENTIAL = {"llama": 1, "gpt2": 1, "gpt_neox_sequential": 1, "falcon_sequential": 1, "qwen3_moe": 1, "granite": 0.22}
PARALLEL = ["gpt_neox", "falcon_parallel", "falcon_two_norms", "gptj", "phi", "codegen", "cohere"]
ITSELF = "adds the residual stream itself"
REFUSED = {
    "bloom": {"attn_out": ITSELF, "mlp_out": ITSELF},
    "mpt": {"mlp_out": ITSELF},
    "granitemoeshared": {"mlp_out": "is not the output of model.layers.0.block_sparse_moe alone"},
    "opt": {"mlp_out": "no module for the MLP"},
    "gpt_neox": {"resid_mid": "read the same residual stream"},
    "gptj": {"resid_mid": "read the same residual stream"},
    "opt_norms_behind": {"resid_mid": "nothing in this model's layers reads", "mlp_out": "no module for the MLP"},
}
SETTINGS = {"granitemoeshared": {"shared_intermediate_size": 16}}
IDS = torch.arange(20, 32).view(1, 12)


@pytest.fixture
def made(build):
    """`made(name)`: the model, from this project's small configs or a small default config."""

    def make(name, dtype=torch.float32):
        try:
            return build(name, dtype)
        except KeyError:
            return built(name, **SETTINGS.get(name, {})).to(dtype)

    return make


@torch.inference_mode()
def values(hf, *names):
    """What one forward pass shows at these names of layer 1."""
    points = {
        point.name: point.place for point in Points.learn(hf).resolve(Capture(points=[f"layers.1.{n}" for n in names]))
    }
    seen = watch(hf, IDS.to(hf.device))
    places = [points[f"layers.1.{TRANSFORMER_LENS[name]}"] for name in names]
    return [seen[place.module, place.side].reshape(*IDS.shape, -1) for place in places]


def assert_same(got, want):
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_attention_and_the_mlp_add_their_outputs_one_after_the_other(name, made):
    names = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    before, attention, middle, mlp, after = values(made(name), *names)
    assert_same(middle, before + SEQUENTIAL[name] * attention)
    assert_same(after, middle + SEQUENTIAL[name] * mlp)


@pytest.mark.parametrize("name", PARALLEL)
def test_or_both_at_once(name, made):
    before, attention, mlp, after = values(made(name), "resid_pre", "attn_out", "mlp_out", "resid_post")
    assert_same(after, before + attention + mlp)


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_would_mean_something_else_is_refused_with_the_reason(name, made):
    points = Points.learn(made(name))
    for hook in TRANSFORMER_LENS:
        if reason := REFUSED[name].get(hook):
            with pytest.raises(RequestError, match=re.escape(reason)) as refused:
                points.resolve(Capture(points=[hook]))
            assert refused.value.code == "unknown_point"
        elif hook != "pattern":
            assert points.resolve(Capture(points=[hook]))


def test_where_the_mlp_adds_the_stream_what_it_adds_to_is_the_stream(made):
    before, middle, attention = values(made("mpt"), "resid_pre", "resid_mid", "attn_out")
    assert_same(middle, before + attention)
    [middle] = values(hf := made("bloom"), "resid_mid")
    assert torch.equal(middle, watch(hf, IDS)["transformer.h.1.self_attention", "output"])


def test_a_layer_that_adds_to_a_copy_has_no_stream_to_change(build):
    hf = build("llama")
    hf.model.layers[1].post_attention_layernorm.register_forward_pre_hook(lambda _, args: (args[0].clone(),))
    points = Points.learn(hf)
    assert points.resolve(Capture(points=["layers.0.resid_mid", "layers.2.resid_mid"]))
    with pytest.raises(RequestError, match="does not add to what model.layers.1.post_attention_layernorm reads"):
        points.resolve(Capture(points=["layers.1.resid_mid"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "gpt_neox"])
def test_rounding_takes_no_name_away(name, dtype, build):
    hooks = ["resid_pre", "attn_out", "mlp_out", "resid_post", *(["resid_mid"] if name != "gpt_neox" else [])]
    assert len(Points.learn(build(name, dtype)).resolve(Capture(points=hooks))) == 3 * len(hooks)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "opt", "bloom", "olmo2"])
def test_only_names_that_would_be_accepted_are_proposed(name, made):
    points = Points.learn(made(name))
    asked = [f"layers.1.{hook}" for hook in TRANSFORMER_LENS] + [
        f"layers.1.{site}" for site in TRANSFORMER_LENS.values()
    ]
    asked += [name[:-1] for name in (*asked, *TRANSFORMER_LENS) if name != "z"] + [
        "blocks.1.hook_resid_mit",
        "blocks.9.hook_resid_mit",
    ]
    proposed = set()
    for wrong in asked:
        try:
            points.resolve(Capture(points=[wrong]))
        except RequestError as refused:
            proposed |= set(refused.message.partition("nearest names are ")[2].split(", ")) - {""}
    assert proposed
    for name in proposed:
        assert points.resolve(Capture(points=[name]))
