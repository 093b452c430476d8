"""Points within attention and experts, and of layers of several kinds, on the architectures that have them."""

import pytest
import torch

from deployments.engine.edits import Edit
from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.errors import RequestError
from deployments.model.model import Model
from deployments.places.points import Points, structure
from deployments.points.capture import Capture
from tests.deployments.model.architectures import built

MIXTURES = {
    **dict.fromkeys(["afmoe", "aria_text", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe"], {}),
    **dict.fromkeys(["exaone_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "hy_v3"], {}),
    **dict.fromkeys(["jetmoe", "laguna", "llama4_text", "mimo_v2_flash", "minimax_m2", "mixtral", "olmoe"], {}),
    **dict.fromkeys(["phimoe", "qwen2_moe", "qwen3_moe", "solar_open"], {}),
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
}
WITHOUT_IDS = ("jetmoe",)
PROMPTS = ([5, 9, 200, 31, 7], [77, 3], [12, 13, 14, 15, 16, 17, 18, 19])


def names(points, *patterns):
    return [point.name for point in points.resolve(Capture(points=list(patterns)))]


def refusal(points, *patterns):
    with pytest.raises(RequestError) as refused:
        points.resolve(Capture(points=list(patterns)))
    return refused.value.message


def returned(hf, tokens):
    """What each module's arguments and output have, flat, in a plain forward: module path -> tensors."""
    seen, handles = {}, []
    for path, module in hf.named_modules():
        hook = lambda _, args, kwargs, output, path=path: seen.update({path: [args, kwargs.values(), output]})  # noqa: E731
        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    with torch.inference_mode():
        hf(input_ids=torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    flat = lambda value: [each for one in value for each in flat(one)] if isinstance(value, (tuple, list)) else [value]  # noqa: E731
    found = {path: flat([[*args], [*named], output]) for path, (args, named, output) in seen.items()}
    return {path: [each for each in of if isinstance(each, torch.Tensor)] for path, of in found.items()}


@pytest.mark.parametrize("architecture", MIXTURES)
def test_routers_and_experts_are_recorded_by_token_beside_other_sequences(architecture, byte_tokenizer):
    model = Model(built(architecture, **MIXTURES[architecture]), byte_tokenizer, architecture)
    wanted = ["layers.*.mlp.router"] + ["layers.*.mlp.experts"] * (architecture not in WITHOUT_IDS)
    capture = Capture(points=wanted, dtype="bfloat16")
    points = model.points.resolve(capture)
    assert {point.name.split(".", 2)[2] for point in points} == (
        {"mlp.router"} if architecture in WITHOUT_IDS else {"mlp.router", "mlp.experts.ids", "mlp.experts.weights"}
    )
    sent = [Request(str(i), ids, 3, capture=capture, points=points, ignore_eos=True) for i, ids in enumerate(PROMPTS)]
    for request, done in zip(sent, Engine(model).generate(sent), strict=True):
        seen = returned(model.hf, [*request.prompt, *done.tokens])
        for point in points:
            got = done.captured.values[point.name]
            assert (got.dtype == torch.int64) == point.name.endswith(".ids")  # ids are not rounded
            # A router that is no linear layer returns its logits beside other tensors.
            alike = [of for of in seen[point.place.module] if of.reshape(len(of), -1).shape == got.shape]
            if architecture == "llama4_text" and point.place.side != "logits":  # scores, 0 for the other experts
                alike = [*seen[point.place.module][-2].topk(2)]
            assert any(torch.allclose(of.to(got.dtype), got, 1e-2, 1e-3) for of in alike), point


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss", "deepseek_v3", "afmoe", "llama4_text"])
def test_changed_logits_of_a_router_choose_other_experts(architecture, byte_tokenizer):
    model = Model(built(architecture), byte_tokenizer, architecture)
    capture = Capture(points=["layers.2.mlp.experts"])
    (router,) = model.points.named("layers.2.mlp.router", "")
    chosen = []
    for expert in range(2):
        edit = Edit(router, "add", vector=torch.full((1,), 1e4), features=(expert,))
        request = Request("0", PROMPTS[0], 2, capture=capture, points=model.points.resolve(capture), edits=(edit,))
        (done,) = Engine(model).generate([request])
        ids = done.captured.values["layers.2.mlp.experts.ids"]
        assert (ids == expert).any(1).all()
        chosen.append(ids)
    assert not torch.equal(*chosen)


def test_a_star_means_the_layers_that_have_the_part():
    points = Points.learn(built("deepseek_v3"))  # its first layer has no experts
    assert names(points, "layers.*.mlp.router") == ["layers.1.mlp.router", "layers.2.mlp.router"]
    assert "no router" in refusal(points, "layers.0.mlp.router")
    assert "layers.0.mlp.routr" in refusal(points, "layers.*.mlp.routr")
    assert names(points, "layers.-1.mlp.experts") == ["layers.2.mlp.experts.ids", "layers.2.mlp.experts.weights"]


def test_queries_and_keys_need_sequences_that_share_forward_passes(byte_tokenizer, tiny):
    assert "registry" in refusal(tiny("falcon_parallel").points, "layers.0.attention.q")
    bart = Model(built("bart"), byte_tokenizer, "bart")
    assert "one at a time" in refusal(bart.points, "layers.0.attention.q")


NEMOTRON = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mlp", "moe"]}
LINEAR = "linear_attention"
# Architecture -> its settings, and the name of each layer's mixer, * after that of attention.
HYBRIDS = {
    "qwen3_next": ({}, "linear_attn self_attn* linear_attn"),
    "falcon_h1": ({}, "mamba* mamba* mamba*"),
    "granitemoehybrid": ({"layer_types": [LINEAR, "full_attention", LINEAR]}, "mamba self_attn* mamba"),
    "jamba": ({"attn_layer_period": 3, "attn_layer_offset": 1}, "mamba self_attn* mamba"),
    "minimax": ({}, "self_attn* self_attn self_attn*"),
    "recurrent_gemma": ({}, "temporal_block temporal_block temporal_block*"),
    "nemotron_h": (NEMOTRON, "mixer mixer* - -"),
    "mamba2": ({}, "mixer mixer mixer"),
    "lfm3": ({}, "conv self_attn* self_attn*"),
    "zamba": ({}, "mamba mamba mamba mamba"),
}


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_each_layer_that_mixes_tokens_has_a_mixer_and_some_have_attention(architecture):
    settings, layers = HYBRIDS[architecture]
    points, layers = Points.learn(hf := built(architecture, **settings)), layers.split()
    attending = [i for i, mixer in enumerate(layers) if mixer.endswith("*")]
    found = points.resolve(Capture(points=["layers.*.mixer.output"]))
    mixers = {int(point.name.split(".")[1]): point.place.module.rpartition(".")[2] for point in found}
    assert mixers == {i: mixer.removesuffix("*") for i, mixer in enumerate(layers) if mixer != "-"}
    assert points.layer_kinds == structure(hf, points, 96)["layer_kinds"] == list(hf.config.layer_types)
    if attending:
        assert names(points, "attn_out") == [f"layers.{i}.attention.output" for i in attending]
        assert names(points, "layers.*.attention.k") == [f"layers.{i}.attention.k" for i in attending]
    for layer in {*range(len(layers))} - {*attending}:
        assert "no module for attention" in refusal(points, f"layers.{layer}.attention.q")
