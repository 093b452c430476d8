"""Names of capture points refer to the right modules on each architecture."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import RequestError
from deployments.places.points import MAX_POINTS, Points
from deployments.points.capture import Capture

# Architecture -> where its attention and its MLP read, below a layer.
READERS = {
    "qwen3": ("self_attn.q_proj", "mlp.gate_proj"),
    "qwen3_moe": ("self_attn.q_proj", "mlp"),
    "qwen2": ("self_attn.q_proj", "mlp.gate_proj"),
    "llama": ("self_attn.q_proj", "mlp.gate_proj"),
    "gpt2": ("attn.c_attn", "mlp.c_fc"),
    "gpt_neox": ("attention.query_key_value", "mlp.dense_h_to_4h"),
    "gpt_neox_sequential": ("attention.query_key_value", "mlp.dense_h_to_4h"),
    "mistral": ("self_attn.q_proj", "mlp.gate_proj"),
    "gemma2": ("self_attn.q_proj", "mlp.gate_proj"),
    "gemma3": ("self_attn.q_proj", "mlp.gate_proj"),
    "opt": ("self_attn.q_proj", "fc1"),
    "phi3": ("self_attn.qkv_proj", "mlp.gate_up_proj"),
    "granite": ("self_attn.q_proj", "mlp.gate_proj"),
    "falcon_two_norms": ("self_attention.query_key_value", "mlp.dense_h_to_4h"),
    "falcon_sequential": ("self_attention.query_key_value", "mlp.dense_h_to_4h"),
}
ATTENTION_OUT = {
    "gpt2": "attn.c_proj",
    "gpt_neox": "attention.dense",
    "gpt_neox_sequential": "attention.dense",
    "opt": "self_attn.out_proj",
    "falcon_two_norms": "self_attention.dense",
    "falcon_sequential": "self_attention.dense",
}
NORMS_BEHIND = ["olmo2", "exaone4", "opt_norms_behind"]
SITES = ("input_layernorm.output", "post_attention_layernorm.output")


@pytest.fixture(scope="module")
def llama(tiny):
    return tiny("llama").points


def names(of, **capture):
    return [point.name for point in of.resolve(Capture.model_validate(capture))]


def refusal(of, **capture):
    with pytest.raises(RequestError) as refused:
        of.resolve(Capture.model_validate(capture))
    assert refused.value.status == 400
    return refused.value


def record(hf, modules):
    """(module, side) -> tensor, of one forward, in the order in which they came."""
    seen, handles = {}, []

    def keep(path, side, value):
        if isinstance(value, tuple):
            seen.update({(path, side): None, (path, "weights"): None})  # in this order
            value = value[0]
        seen[path, side] = value.clone().reshape(8, -1) if isinstance(value, torch.Tensor) else None

    for path in modules:
        module = hf.get_submodule(path)
        before = lambda _, args, kwargs, path=path: keep(path, "input", next(iter((*args, *kwargs.values()))))  # noqa: E731
        after = lambda _, args, output, path=path: keep(path, "output", output)  # noqa: E731
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    with torch.inference_mode():
        hf(input_ids=torch.arange(3, 11, device=hf.device)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("architecture", READERS)
def test_layernorm_points_are_what_attention_and_the_mlp_read(architecture, tiny):
    model = tiny(architecture)
    attention, mlp = READERS[architecture]
    for layer in range(model.points.layer_count):
        norms = model.points.resolve(Capture(layers=[layer], sites=list(SITES)))
        by_name = {point.name.split(".")[2]: point.place.module for point in norms}
        readers = [f"{model.points.layers}.{layer}.{path}" for path in (attention, mlp)]
        seen = record(model.hf, [*by_name.values(), *readers])
        assert torch.equal(seen[by_name["input_layernorm"], "output"], seen[readers[0], "input"])
        assert torch.equal(seen[by_name["post_attention_layernorm"], "output"], seen[readers[1], "input"])


@pytest.mark.parametrize("architecture", READERS)
def test_heads_are_what_the_output_projection_reads(architecture, tiny):
    model = tiny(architecture)
    (heads,) = model.points.resolve(Capture(points=["layers.1.attention.heads"]))
    projection = ATTENTION_OUT.get(architecture, "self_attn.o_proj")
    assert heads.module == f"{model.points.layers}.1.{projection}.input"
    assert heads.shape == (4, 8)


@pytest.mark.parametrize("architecture", NORMS_BEHIND)
def test_where_no_norm_is_read_by_its_part_the_name_is_refused_and_the_default_is_the_layers_input(architecture, tiny):
    points = tiny(architecture).points
    for i, site in enumerate(SITES):
        error = refusal(points, points=["embed.output"] * i + [f"layers.1.{site}"])
        assert error.field == f"capture.points[{i}]"
        assert "layers.1." in error.message
    assert names(points) == ["layers.1.input", "layers.2.input"]
    assert names(points, layers=[0, 2]) == ["layers.0.input", "layers.2.input"]


def test_a_parallel_block_has_the_one_norm_it_has(tiny):
    points = tiny("falcon_parallel").points
    assert names(points) == ["layers.1.input_layernorm.output", "layers.2.input_layernorm.output"]
    assert refusal(points, layers=[0], sites=[SITES[1]]).field == "capture.sites[0]"


@pytest.mark.parametrize(
    ("depth", "layers"),
    [(1, [0]), (2, [0, 1]), (3, [1, 2]), (6, [2, 3, 4]), (12, [4, 6, 8])] + [(d, [8, 12, 16]) for d in range(24, 29)],
)
def test_default_points_are_both_norms_at_a_third_a_half_and_two_thirds_of_the_depth(depth, layers, build):
    hf = build("llama", num_hidden_layers=depth, hidden_size=8, intermediate_size=8, head_dim=2)
    points = Points.learn(hf)
    assert names(points) == [f"layers.{layer}.{site}" for layer in layers for site in SITES]
    assert points.default_names() == names(points)


@pytest.mark.parametrize("name", ["layers.-1.output", "layers[-1].output", "layers[2].output", "layers.2.output"])
def test_indices_count_from_either_end_and_come_in_brackets_too(name, llama):
    assert names(llama, points=[name]) == ["layers.2.output"]


def test_the_models_own_paths_work_with_the_same_indices(llama):
    asked = [
        "model.layers[-1].self_attn.q_proj.output",
        "model.layers.0.mlp.input",
        "model.layers[*].mlp.down_proj.input",
    ]
    assert set(names(llama, points=asked)) == {
        "model.layers.2.self_attn.q_proj.output",
        "model.layers.0.mlp.input",
        *(f"model.layers.{i}.mlp.down_proj.input" for i in range(3)),
    }


def test_layers_by_sites_gives_every_pair(llama):
    assert names(llama, layers=[0, -1], sites=["output", "mlp.input"]) == [
        "layers.0.mlp.input",
        "layers.0.output",
        "layers.2.mlp.input",
        "layers.2.output",
    ]
    assert names(llama, layers="all", sites=["output"]) == [f"layers.{i}.output" for i in range(3)]
    assert names(llama, layers=[1]) == [f"layers.1.{site}" for site in SITES]
    assert names(llama, sites=["output"]) == ["layers.1.output", "layers.2.output"]
    assert names(llama, layers=[1], sites=["resid_pre", "resid_post"]) == ["layers.1.input", "layers.1.output"]


def test_points_and_layers_add_up_and_a_point_named_twice_is_one(llama):
    assert names(llama, points=["norm.output", "layers.1.output"], layers=[1, -2], sites=["output"]) == [
        "layers.1.output",
        "norm.output",
    ]


@pytest.mark.parametrize("architecture", [*READERS, "olmo2", "exaone4", "falcon_parallel"])
def test_points_resolve_in_the_order_in_which_a_forward_reaches_them(architecture, tiny):
    model = tiny(architecture)
    everything = [point for point in model.points if point.place.grows or point.place.side in ("input", "output")]
    resolved = model.points.resolve(Capture(points=[point.name for point in reversed(everything)]))
    reached = list(record(model.hf, {point.place.module for point in everything}))
    wanted = {(point.place.module, point.place.side) for point in everything}
    assert [(point.place.module, point.place.side) for point in resolved] == [at for at in reached if at in wanted]


def test_a_mask_is_no_point_though_it_may_have_a_number_for_each_token(tiny):
    points = tiny("opt").points
    assert refusal(points, points=["model.decoder.embed_positions.input"]).code == "unknown_point"
    assert names(points, points=["model.decoder.embed_positions.output"])


def test_rows_in_a_routers_order_are_no_point_though_there_is_one_for_each_token(build):
    points = Points.learn(build("qwen3_moe", num_experts_per_tok=1))
    assert refusal(points, points=["model.layers.1.mlp.experts.act_fn.output"]).code == "unknown_point"
    assert names(points, points=["model.layers.1.mlp.gate.output", "model.layers.1.mlp.experts.input"])


@pytest.mark.parametrize(
    ("capture", "field"),
    [
        ({"points": ["norm.output", "layers.0.atention.output"]}, "capture.points[1]"),
        ({"points": ["layers.3.output"]}, "capture.points[0]"),
        ({"points": ["layers.-4.output"]}, "capture.points[0]"),
        ({"points": ["layers.0"]}, "capture.points[0]"),
        ({"points": ["layers.3.attention.weights"]}, "capture.points[0]"),
        ({"layers": [0, 3]}, "capture.layers[1]"),
        ({"layers": [0, -4], "sites": ["output"]}, "capture.layers[1]"),
        ({"layers": [0], "sites": ["output", "outpt"]}, "capture.sites[1]"),
        ({"points": ["norm.output"], "features": {"first": 33}}, "capture.features"),
        ({"points": ["norm.output"], "features": {"index": [0, 32]}}, "capture.features"),
        ({"points": ["layers.0.attention.heads"], "features": {"first": 9}}, "capture.features"),
    ],
)
def test_what_is_not_there_is_refused_by_the_path_of_its_field(capture, field, llama):
    assert refusal(llama, **capture).field == field


def test_the_last_feature_may_be_asked_for(llama):
    assert names(llama, points=["norm.output"], features={"index": [31]}) == ["norm.output"]
    assert names(llama, points=["norm.output"], features={"first": 32}) == ["norm.output"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("layers.1.atention.output", "layers.1.attention.output"),
        ("lmhead.output", "lm_head.output"),
        ("model.layers.0.self_attn.qproj.output", "model.layers.0.self_attn.q_proj.output"),
        ("layers.2", "layers.2.output, layers.2.input"),
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj.output"),
        ("resid_pos", "nearest names are resid_post"),
    ],
)
def test_a_name_that_is_nothing_gets_the_nearest_names(name, nearest, llama):
    error = refusal(llama, points=[name])
    assert nearest in error.message
    assert error.code == "unknown_point"


def test_more_points_than_the_limit_are_refused(build):
    points = Points.learn(build("llama", num_hidden_layers=120, hidden_size=4, intermediate_size=4, head_dim=2))
    listed = [f"{point.place.module}.{point.place.side}" for point in points] + [point.name for point in points]
    stars = sorted({name.replace(".7.", ".*.") for name in listed if "layers.7." in name})
    assert len(stars) * points.layer_count > MAX_POINTS
    assert refusal(points, points=stars).field.startswith("capture.points[")


@pytest.mark.parametrize(
    "name",
    [
        "__class__",
        "layers.0.__class__.output",
        "layers.0.forward.output",
        "model.layers.0.self_attn.q_proj.weight",
        "layers[__import__('os')].output",
        "layers.0.attention.heads\n",
        "model..output",
        "config.output",
    ],
)
def test_a_name_is_looked_up_and_never_evaluated(name, llama):
    assert refusal(llama, points=[name]).field == "capture.points[0]"


@given(st.text(min_size=1, max_size=40) | st.from_regex(r"(model\.)?layers[.\[]-?\d{1,3}\]?\.[a-z_.]{0,20}"))
def test_any_string_is_a_point_or_a_refusal(tiny, name):
    model = tiny("llama")
    modules = dict(model.hf.named_modules())
    try:
        found = {(point.place.module, point.place.side) for point in model.points.resolve(Capture(points=[name]))}
    except RequestError as error:
        refused = error.field
    else:
        refused = None
        assert all(module in modules and side in ("input", "output", "weights") for module, side in found)
    assert refused in (None, "capture.points[0]")
