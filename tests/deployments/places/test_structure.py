"""The structure of a model as clients get it."""

from __future__ import annotations

import json

import pytest

from deployments.places.points import structure
from deployments.points.capture import Capture

SOME = ["qwen3", "qwen3_moe", "gpt2", "gpt_neox", "gemma2", "opt", "olmo2", "falcon_parallel"]


@pytest.fixture(params=SOME)
def model(request, tiny):
    return tiny(request.param)


@pytest.fixture
def described(model):
    return structure(model.hf, model.points, model.context)


def walk(module):
    yield module
    for child in module.get("children", ()):
        yield from walk(child)


def test_it_tells_the_models_sizes(model, described):
    assert described["architecture"] == type(model.hf).__name__
    assert (described["layers"], described["hidden_size"], described["max_model_len"], described["dtype"]) == (
        3,
        32,
        96,
        "float32",
    )
    json.dumps(described)


def test_every_point_it_names_is_one_that_a_request_may_capture(model, described):
    listed = described["points"]
    names = [point["name"] for point in listed]
    assert len(set(names)) == len(names)
    found = {point.name: point for point in model.points.resolve(Capture(points=names))}
    for point in listed:
        known = found[point["name"]]
        assert point["module"] == known.module
        assert tuple(point["shape"]) == ((4, "tokens") if known.place.grows else known.shape)
        assert point["dtype"] == str(known.place.dtype).removeprefix("torch.")


def test_every_point_of_the_model_is_named_canonically_where_it_can_be(model, described):
    names = {point["name"] for point in described["points"]}
    assert {point.name for point in model.points} <= names
    assert {"embed.output", "layers.0.input", "layers.2.attention.output", "norm.output", "lm_head.output"} <= names
    heads = {point["name"]: point["shape"] for point in described["points"] if point["name"].endswith(".heads")}
    assert heads == {f"layers.{i}.attention.heads": [4, 8] for i in range(3)}


def test_modules_are_told_once_where_they_are_built_alike(model, described):
    paths = {module["path"]: module["class"] for module in walk(described["modules"])}
    layers = model.points.layers
    assert paths[""] == described["architecture"]
    assert paths[f"{layers}.0-2"] == type(model.hf.get_submodule(f"{layers}.0")).__name__
    assert f"{layers}.1" not in paths
    for path, module in model.hf.named_modules():
        if path.startswith(f"{layers}.0.") and "experts" not in path:
            assert paths[path.replace(f"{layers}.0.", f"{layers}.0-2.", 1)] == type(module).__name__


def test_modules_that_differ_are_told_apart(build, byte_tokenizer):
    import torch

    from deployments.places.points import Points

    hf = build("llama", num_hidden_layers=4)
    hf.model.layers[1].mlp.gate_proj = torch.nn.Linear(32, 48, bias=True, device=hf.device)
    paths = {module["path"] for module in walk(structure(hf, Points.learn(hf), 96)["modules"])}
    layers = {path for path in paths if path.count(".") == 2 and path.startswith("model.layers.")}
    assert layers == {"model.layers.0", "model.layers.1", "model.layers.2-3"}
