"""SAELens' directories become readouts, or are rejected with the reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

sys.path.append(str(Path(__file__).parent))  # importlib mode adds no folder
from saes_by_hand import sae

from deployments.errors import RequestError
from deployments.readouts.files import read_saelens

CONFIG = {
    "architecture": "jumprelu",
    "d_in": 8,
    "d_sae": 16,
    "dtype": "float32",
    "apply_b_dec_to_input": False,
    "normalize_activations": "none",
    "metadata": {"hook_name": "blocks.3.hook_resid_post", "model_name": "gpt2", "sae_lens_version": "6.0"},
}


def saved(directory: Path, activation: str = "jumprelu", **config: Any) -> Path:
    (directory / "cfg.json").write_text(json.dumps(CONFIG | config))
    save_file(load(sae(8, 16, activation)), directory / "sae_weights.safetensors")
    return directory


def test_a_directory_is_read(tmp_path: Path) -> None:
    spec, tensors = read_saelens(saved(tmp_path))
    assert spec == {
        "kind": "sae",
        "activation": "jumprelu",
        "apply_b_dec_to_input": False,
        "normalize_activations": "none",
        "model": "gpt2",
        "point": "layers.3.output",
    }
    assert sorted(tensors) == ["W_dec", "W_enc", "b_dec", "b_enc", "threshold"]


def test_one_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    more = {"architecture": "standard", "activation_fn": "topk", "activation_fn_kwargs": {"k": 7}, "metadata": None}
    more |= {"hook_name": "blocks.0.hook_mlp_out", "model_name": "gpt2", "hook_layer": 0, "seqpos_slice": [None]}
    spec, _ = read_saelens(saved(tmp_path, "topk", **more))
    assert (spec["activation"], spec["k"], spec["point"]) == ("topk", 7, "layers.0.mlp.output")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"architecture": "transcoder"}, "architecture"),
        ({"architecture": "matryoshka"}, "architecture"),
        ({"l1_coefficient": 1.0}, "l1_coefficient"),
        ({"finetuning_scaling_factor": True}, "finetuning_scaling_factor"),
        ({"model_from_pretrained_kwargs": {"fold_ln": True}}, "model_from_pretrained_kwargs.fold_ln"),
        ({"metadata": {"hook_name": "blocks.3.ln1.hook_scale"}}, "hook_name"),
        (
            {"metadata": {"hook_name": "blocks.3.hook_resid_pre", "hook_name_out": "blocks.3.hook_mlp_out"}},
            "architecture",
        ),
        ({"metadata": {"hook_point": "blocks.3.hook_resid_pre"}}, "hook_point"),
        ({"activation_fn_str": "tanh-relu"}, "activation_fn"),
        ({"activation_fn": "topk", "activation_fn_kwargs": {"k": 8}}, "activation_fn"),
        ({"architecture": "standard", "activation_fn_kwargs": {"k": 8}}, "activation_fn_kwargs.k"),
        ({"architecture": "topk", "activation_fn_kwargs": {"k": 8, "dim": 0}}, "activation_fn_kwargs.dim"),
        ({"k": 8}, "k"),
        ({"rescale_acts_by_decoder_norm": True}, "rescale_acts_by_decoder_norm"),
        ({"normalize_activations": "expected_average_only_in"}, "normalize_activations"),
        ({"normalize_activations": "covariance_whitening"}, "normalize_activations"),
        ({"reshape_activations": "other"}, "reshape_activations"),
        ({"metadata": {"hook_name": "blocks.3.attn.hook_z", "hook_head_index": 2}}, "hook_head_index"),
        ({"residual_threshold": 0.01}, "residual_threshold"),
        ({"d_in": 9}, "d_in"),
        ({"d_sae": 9}, "d_sae"),
    ],
)
def test_what_can_be_no_readout_is_refused_by_name(tmp_path: Path, config: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=".") as refused:
        read_saelens(saved(tmp_path, **config))
    assert refused.value.field == field


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cfg.json").write_text(json.dumps(CONFIG))
    with pytest.raises(RequestError, match="is not a SAELens directory"):
        read_saelens(tmp_path)


def test_every_dtype_is_taken(tmp_path: Path) -> None:
    saved(tmp_path)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in load(sae(8, 16, "jumprelu")).items()}
    save_file(half, tmp_path / "sae_weights.safetensors")
    assert read_saelens(tmp_path)[1]["W_enc"].dtype == torch.bfloat16
