"""Checkpoints of models that also take images, and quantized ones: what becomes of their weights."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from deployments.model.load import load
from deployments.model.packing import UnsupportedModelError
from deployments.model.weights import SharedWeights
from deployments.points.capture import Capture
from tests.adapters import lora

pytestmark = pytest.mark.cpu

IDS = torch.arange(3, 20)[None]
SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 96, "pad_token_id": 0}
SIZES |= {"eos_token_id": 7}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "patch_size": 4, "image_size": 16}
TOWER |= {"num_hidden_layers": 1, "depth": 1, "num_heads": 4, "out_hidden_size": 32}
THREE_AXES = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
FAMILIES = {
    "Gemma3Config": {},
    "Mistral3Config": {"model_type": "mistral"},
    "LlavaConfig": {"model_type": "llama"},
    "Qwen3_5Config": THREE_AXES | {"layer_types": ["linear_attention", "full_attention"]},
    "Qwen2_5_VLConfig": THREE_AXES,
    "Llama4Config": {"intermediate_size_mlp": 48, "num_local_experts": 2},
}


def saved(directory, tokenizer, name, sizes):
    """The model of a config, whose weights and tokenizer are written to a directory."""
    whole = {"text_config": SIZES | sizes, "vision_config": TOWER | ({"model_type": "pixtral"} if "Mi" in name else {})}
    whole["tie_word_embeddings"] = "3" in name  # stated for the whole model, not for its text
    tokens = {"image_token_id": 200, "image_token_index": 200, "video_token_id": 201, "boi_token_index": 202}
    given = SIZES if name == "Qwen3Config" else whole | tokens
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM if name == "Qwen3Config" else transformers.AutoModelForMultimodalLM
    model = kind.from_config(getattr(transformers, name)(**given)).eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def quantize(directory, method, tensors=None):
    """State a quantization in a saved model's config, and write these tensors in the place of its own."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    (directory / "model.safetensors").unlink()
    if tensors:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("name", "sizes"), FAMILIES.items())
def test_a_model_that_takes_images_is_served_without_towers(name, sizes, tmp_path, byte_tokenizer):
    whole = saved(tmp_path, byte_tokenizer, name, sizes)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    model = load(str(tmp_path), device="cpu")
    with torch.inference_mode():
        torch.testing.assert_close(model.hf(IDS).logits, whole(input_ids=IDS).logits)
    assert not [path for path, _ in model.hf.named_modules() if "vision" in path or "visual" in path or "multi" in path]
    assert (model.context, model.eos - {256}) == (96, {7})  # 256: a tokenizer's own
    assert model.tokenizer.chat_template == "{{ messages }}"
    assert model.unembedding.refusal is None
    points = model.points.resolve(Capture(points=["blocks.*.hook_resid_post"]))
    assert [point.name for point in points] == ["layers.0.output", "layers.1.output"]


def test_a_checkpoint_without_some_weights_is_refused(tmp_path, byte_tokenizer):
    saved(tmp_path, byte_tokenizer, "Gemma3Config", {})
    tensors = load_file(tmp_path / "model.safetensors")
    lacking = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    del tensors[lacking]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="no weights for 1 tensors .*layers.1.mlp.up_proj.weight"):
        load(str(tmp_path), device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_fp8_are_dequantized_where_no_kernel_takes_them(dtype, tmp_path, byte_tokenizer):
    reference = saved(tmp_path, byte_tokenizer, "Qwen3Config", {})
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].view(rows // 8, 8, columns // 8, 8)
        scale = blocks.abs().amax((1, 3)) / 448
        eighths = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        dequantized = (eighths.float() * scale[:, None, :, None]).view(rows, columns)
        reference.get_parameter(name).data = dequantized
        tensors |= {name: eighths.view(rows, columns), name + "_scale_inv": scale}
    quantize(tmp_path, {"quant_method": "fp8", "weight_block_size": [8, 8]}, tensors)
    model = load(str(tmp_path), device="cpu", dtype=dtype, share=True)
    assert model.quantization == {"method": "fp8", "dequantized": True}
    for name, weight in reference.named_parameters():
        assert torch.equal(model.hf.get_parameter(name), weight.to(getattr(torch, dtype)))
    with torch.inference_mode():
        expected = lora(reference, tmp_path / "lora")(IDS).logits
        found = load(str(tmp_path), device="cpu", dtype="float32", adapter=str(tmp_path / "lora")).hf(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"quant_method": "awq", "bits": 4}, "pip install gptqmodel"),
        ({"quant_method": "spqr"}, "GPU is required"),
        ({"quant_method": "unheard-of"}, "unheard-of"),
    ],
)
def test_a_quantization_that_does_not_run_is_refused_before_weights_are_read(method, said, tmp_path, byte_tokenizer):
    saved(tmp_path, byte_tokenizer, "Qwen3Config", {})
    quantize(tmp_path, method)  # without weights, whose absence would be another error
    with pytest.raises(UnsupportedModelError, match=f"quantized by {method['quant_method']}, .*{said}"):
        load(str(tmp_path), device="cpu")


def test_weights_of_a_class_of_their_own_cannot_be_shared(build):
    class Packed(torch.nn.Parameter):
        """As in packages for quantized weights."""

    hf = build("qwen3")
    hf.lm_head.weight = Packed(hf.lm_head.weight.data, requires_grad=False)
    with pytest.raises(ValueError, match="its weights are quantized, as Packed"):
        SharedWeights.of(hf)
