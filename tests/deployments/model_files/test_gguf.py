"""A GGUF file becomes a directory with the same weights, once, or is rejected with the reason."""

from __future__ import annotations

import importlib.util
import json
import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.errors import LoadError
from deployments.model.load import load
from deployments.model_files.gguf import kept
from tests.deployments.model_files.gguf_writing import llama, tensors, vocabulary, write

IDS = torch.arange(3, 43).reshape(2, 20)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def read(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()


def test_a_file_of_floats_gives_the_same_logits(tmp_path):
    directory = kept(write(tmp_path / "tiny.gguf"), tmp_path / "models")
    assert torch.equal(logits(read(directory)), logits(llama()))


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_a_file_of_halves_keeps_them(tmp_path, kind, dtype):
    directory = kept(write(tmp_path / "tiny.gguf", GGMLQuantizationType[kind]), tmp_path / "models")
    model = read(directory)
    assert model.dtype == dtype
    weight = llama().model.layers[1].self_attn.k_proj.weight
    assert torch.equal(model.model.layers[1].self_attn.k_proj.weight, weight.to(dtype))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_are_dequantized_and_rounded_once(tmp_path, kind):
    blocks = GGMLQuantizationType[kind]
    model = read(kept(write(tmp_path / "tiny.gguf", blocks), tmp_path / "models"))
    assert model.dtype == torch.bfloat16
    for name, layer in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj")):
        values = quants.dequantize(quants.quantize(tensors()[f"blk.1.{name}.weight"], blocks), blocks)
        weight = model.get_submodule(f"model.layers.1.{layer}").weight
        assert torch.equal(weight, torch.from_numpy(values).bfloat16())
    assert torch.corrcoef(torch.stack([logits(model).float().flatten(), logits(llama()).flatten()]))[0, 1] > 0.9


def test_what_it_is_converted_to_is_a_plain_directory_for_the_engine(tmp_path):
    directory = kept(write(tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0), tmp_path / "models")
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    about = (directory / "README.md").read_text()
    assert "`tiny.gguf`" in about
    assert "Q8_0" in about
    model = load(str(directory), dtype="float32")
    assert model.eos == {2}
    assert model.context == model.tokenizer.model_max_length == 96
    text = "the cat; 12 bats"
    assert model.tokenizer(text)["input_ids"] == vocabulary().encode(text).ids


def test_it_is_converted_once_for_each_content_and_name(tmp_path):
    file, models = write(tmp_path / "tiny.gguf"), tmp_path / "models"
    first = kept(file, models)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert kept(file, models) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert kept(file.rename(tmp_path / "other.gguf"), models) != first
    changed = tensors() | {"output_norm.weight": np.full(32, 2, np.float32)}
    second = kept(write(file, weights=changed), models)
    assert second != first
    assert not torch.equal(logits(read(second)), logits(read(first)))


def test_ends_of_turns_end_a_text_too(tmp_path):
    file = write(tmp_path / "tiny.gguf", tokenizer__ggml__eot_token_id=0)
    assert load(str(kept(file, tmp_path / "models"))).eos == {0, 2}


def without(name: str) -> dict:
    return {key: value for key, value in tensors().items() if key != name}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"architecture": "perceiver"}, "architecture perceiver is not supported"),
        ({"weights": without("blk.1.ffn_up.weight")}, "no weights that fit model.layers.1.mlp.up_proj.weight"),
        ({"weights": tensors() | {"blk.1.ffn_up.weight": np.ones((32, 32), np.float32)}}, "no weights that fit"),
        ({"weights": tensors() | {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, "transformers reads"),
        ({"weights": tensors() | {"rope_freqs.weight": np.full(4, 8, np.float32)}}, "rotary embedding is scaled"),
        ({"llama__rope__scaling__type": "yarn"}, "rotary embedding is scaled"),
        ({"pre": "of-tomorrow"}, "pre-tokenizer 'of-tomorrow'"),
        ({"pre": None}, "pre-tokenizer None"),
    ],
    ids=[
        "architecture",
        "lacking",
        "other-shape",
        "left-out",
        "factors",
        "scaling",
        "pre-tokenizer",
        "no-pre-tokenizer",
    ],
)
def test_what_transformers_would_read_wrongly_is_refused_and_leaves_nothing(tmp_path, given, why):
    file = write(tmp_path / "tiny.gguf", **given)
    with pytest.raises(LoadError) as refused:
        kept(file, tmp_path / "models")
    assert why in refused.value.message
    assert (refused.value.code, refused.value.status) == ("unsupported_model", 400)
    assert not [path for path in (tmp_path / "models").rglob("*") if path.is_dir() and path.name != ".gguf"]


def test_factors_of_one_scale_nothing(tmp_path):
    file = write(tmp_path / "tiny.gguf", weights=tensors() | {"rope_freqs.weight": np.ones(4, np.float32)})
    assert torch.equal(logits(read(kept(file, tmp_path / "models"))), logits(llama()))


@pytest.mark.parametrize("kept_bytes", [0, 3, 4, 30, 2000, -100])
def test_a_file_that_is_cut_short_is_refused(tmp_path, kept_bytes):
    file = write(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(LoadError, match="tiny.gguf"):
        kept(file, tmp_path / "models")


def test_a_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(struct.pack("<Q", 8) + b"{}      ")
    with pytest.raises(LoadError, match="is not a GGUF file"):
        kept(file, tmp_path / "models")


def test_without_its_package_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    file = write(tmp_path / "tiny.gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match="pip install -c constraints.txt gguf"):
        kept(file, tmp_path / "models")


def test_a_loaded_tokenizer_has_the_chat_template_of_the_file(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(kept(write(tmp_path / "tiny.gguf"), tmp_path / "models"))
    said = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False)
    assert said == "<|im_start|>the cat<|im_end|>"
    assert tokenizer(said)["input_ids"] == [1, *vocabulary().encode("the cat").ids, 2]
