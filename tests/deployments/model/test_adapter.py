"""A model with a LoRA adapter in its weights computes what peft computes with the adapter beside them."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.errors import LoadError
from deployments.model.load import CONFIG, PEFT_NEEDED, WEIGHTS, adapter_files, load, merged, revision_of
from deployments.model.packing import UnsupportedModelError
from tests.adapters import lora

IDS = torch.arange(3, 20)[None]
KINDS = {
    "rslora": {"use_rslora": True, "rank_pattern": {"c_attn": 2}},
    "dora": {"use_dora": True},
    "a module of its own": {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]},
    "tied embedding": {"target_modules": ["wte", "c_attn"]},
    "tied head": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["wte", "lm_head"]},
}
NOT_MERGED = {
    "peft_type": "IA3",
    "bias": "all",
    "alora_invocation_tokens": [3],
    "layer_replication": [[0, 2], [1, 3]],
    "megatron_config": {"x": 1},
    "init_lora_weights": "pissa",
    "of_a_later_peft": True,
}

pytest.importorskip("peft")
pytestmark = pytest.mark.cpu


def check(hf, directory, tolerance=1e-5, **settings):
    """Assert that a model with an adapter in its weights gives the logits of the adapter beside them."""
    apart = lora(copy.deepcopy(hf), directory, **settings)
    with torch.no_grad():
        before, expected = hf(IDS).logits, apart(IDS).logits
        found = merged(hf, adapter_files(str(directory))).eval()(IDS).logits
    assert (before - expected).abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=10 * tolerance)


def test_every_architecture_gives_the_logits_of_the_adapter_beside_its_weights(build, architecture, tmp_path):
    check(build(architecture), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_lora_is_merged_whether_weights_are_tied_or_not(build, kind, tmp_path):
    check(build("gpt2"), tmp_path, **KINDS[kind])


def test_weights_keep_their_dtype_and_are_rounded_once(build, tmp_path):
    hf = build("llama", torch.bfloat16)
    lora(build("llama"), tmp_path, target_modules=["q_proj"])
    before = hf.model.layers[1].self_attn.q_proj.weight.float()
    merged(hf, adapter_files(str(tmp_path)))
    parts = load_file(tmp_path / WEIGHTS)
    a, b = (parts[f"base_model.model.model.layers.1.self_attn.q_proj.lora_{part}.weight"] for part in "AB")
    assert torch.equal(hf.model.layers[1].self_attn.q_proj.weight, (before + 2 * b @ a).bfloat16())
    assert {weight.dtype for weight in hf.parameters()} == {torch.bfloat16}


def test_a_model_is_loaded_with_its_adapter_and_shared_with_it(build, byte_tokenizer, tmp_path):
    build("llama").save_pretrained(tmp_path / "base")
    byte_tokenizer.save_pretrained(tmp_path / "base")
    apart = lora(build("llama"), tmp_path / "lora")
    model = load(str(tmp_path / "base"), adapter=str(tmp_path / "lora"), device="cpu", share=True)
    assert model.adapter_revision == revision_of(str(tmp_path / "lora"))
    other = model.shared.module(model.shared.mapped(model.shared.fd))
    with torch.no_grad():
        torch.testing.assert_close(other(IDS).logits, apart(IDS).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedModelError, match="as the adapter"):  # transformers would load what it names
        load(str(tmp_path / "lora"))


@pytest.fixture
def saved(build, tmp_path):
    lora(build("llama"), tmp_path)
    return tmp_path


def refused(directory, hf=None) -> str:
    with pytest.raises(LoadError) as raised:
        merged(hf, adapter_files(str(directory)))
    assert raised.value.field == "adapter"
    return raised.value.message


@pytest.mark.parametrize("name", NOT_MERGED)
def test_what_cannot_be_merged_exactly_is_refused_by_name(saved, name):
    config = json.loads((saved / CONFIG).read_text())
    (saved / CONFIG).write_text(json.dumps(config | {name: NOT_MERGED[name]}))
    assert (NOT_MERGED[name] if name == "peft_type" else name) in refused(saved)


def test_a_pickle_is_not_read(saved, monkeypatch):
    torch.save(load_file(saved / WEIGHTS), saved / "adapter_model.bin")
    (saved / WEIGHTS).unlink()
    monkeypatch.setattr("torch.load", pytest.fail)
    assert "pickle" in refused(saved)


def test_an_adapter_of_which_anything_does_not_fit_is_refused(saved, build):
    assert "does not fit" in refused(saved, build("llama", hidden_size=64))
    assert "does not fit" in refused(saved, build("llama", num_hidden_layers=2))
    assert "does not fit" in refused(saved, build("llama", num_hidden_layers=4))
    assert "does not fit" in refused(saved, build("gpt2"))
    weights = load_file(saved / WEIGHTS)
    weights.pop(next(iter(weights)))
    save_file(weights, saved / WEIGHTS)
    assert "missing" in refused(saved, build("llama"))


def test_quantized_weights_are_left_alone(saved, build):
    hf = build("llama")
    hf.config.quantization_config = {"quant_method": "bitsandbytes"}
    assert "quantized" in refused(saved, hf)


def test_what_is_missing_is_named(saved, monkeypatch):
    assert "nobody/nothing" in refused("nobody/nothing")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused(saved) == PEFT_NEEDED
