"""Reads sparse autoencoders in SAELens' format: `cfg.json` and `sae_weights.safetensors`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from deployments.errors import RequestError
from deployments.points.names import canonical
from deployments.readouts.spec import Normalization

_ARCHITECTURES = {"standard": "relu", "gated": "gated", "topk": "topk", "jumprelu": "jumprelu"}
_TRAINING = ("l1_coefficient", "l0_coefficient", "aux_loss_coefficient", "use_ghost_grads", "jumprelu_init_threshold")
_FOLDING = (
    "fold_ln",
    "center_writing_weights",
    "center_unembed",
    "fold_value_biases",
    "refactor_factored_attn_matrices",
)
_TENSORS = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold", "b_gate", "b_mag", "r_mag")


def read(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read a directory as a readout's spec without a name, and its tensors.

    Raises:
        RequestError: The autoencoder is not supported; the message has the reason.
    """
    try:
        config = json.loads((directory / "cfg.json").read_text())
        tensors = load_file(directory / "sae_weights.safetensors")
    except (OSError, ValueError, RecursionError, KeyError, SafetensorError) as error:  # KeyError: torch lacks the dtype
        raise RequestError(f"{directory} is not a SAELens directory: {error}", "file") from error
    if not isinstance(config, dict):
        raise RequestError(f"{directory}/cfg.json is not a JSON object", "file")
    spec = spec_of(config)
    if "W_enc" not in tensors:
        raise RequestError(f"{directory} has no W_enc, but {', '.join(sorted(tensors))}", "file")
    if (width := config.get("d_in")) not in (None, tensors["W_enc"].shape[0]):
        raise RequestError(f"d_in is {width}, but W_enc has the shape {list(tensors['W_enc'].shape)}", "d_in")
    tensors = {name: tensor for name, tensor in tensors.items() if name in _TENSORS}
    if spec["activation"] == "gated":
        tensors.pop("b_enc", None)
    return spec, tensors


def spec_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `cfg.json` to a readout's spec without a name.

    Raises:
        RequestError: The kind is not supported; names the setting.
    """
    about = {**config, **(config.get("metadata") or {})}
    architecture = config.get("architecture", "standard")
    if "transcoder" in str(architecture) or about.get("hook_name_out") not in (None, about.get("hook_name")):
        raise RequestError("a transcoder reads one point and writes another, so it cannot be a readout", "architecture")
    if architecture not in _ARCHITECTURES:
        raise RequestError(f"{architecture!r} is not one of {', '.join(_ARCHITECTURES)}", "architecture")
    if training := [name for name in _TRAINING if name in config]:
        message = "this is a training run's configuration: save the autoencoder for inference (`save_inference_model`)"
        raise RequestError(message, training[0])
    if config.get("finetuning_scaling_factor"):
        raise RequestError("it is fine-tuned by a scaling factor, which is not supported", "finetuning_scaling_factor")
    if "hook_point" in about:
        message = "this configuration's version does not record whether the model's weights were changed for training"
        raise RequestError(f"{message}: load it with a current SAELens, and save it", "hook_point")
    if folded := [name for name in _FOLDING if (about.get("model_from_pretrained_kwargs") or {}).get(name)]:
        message = f"it was trained on a model whose weights were changed by {folded[0]}: the served model's rows differ"
        raise RequestError(message, f"model_from_pretrained_kwargs.{folded[0]}")
    return _described(config, about, _ARCHITECTURES[architecture])


def _described(config: Mapping[str, Any], about: Mapping[str, Any], activation: str) -> dict[str, Any]:
    arguments = config.get("activation_fn_kwargs") or {}
    function = str(config.get("activation_fn") or config.get("activation_fn_str") or "relu")  # in versions before 6
    if function not in ("relu", "topk"):
        raise RequestError(f"the activation {function!r} is neither relu nor topk", "activation_fn")
    if activation == "relu":
        activation = function
    normalization = config.get("normalize_activations") or "none"
    if normalization == "expected_average_only_in":
        normalization = "none"  # SAELens folds the factor into the weights when it saves
    if normalization not in get_args(Normalization):
        raise RequestError(f"normalize_activations {normalization!r} is not supported", "normalize_activations")
    spec: dict[str, Any] = {
        "kind": "sae",
        "activation": activation,
        "apply_b_dec_to_input": bool(config.get("apply_b_dec_to_input", True)),
        "normalize_activations": normalization,
    }
    if activation == "topk":
        spec["k"] = config.get("k", arguments.get("k"))
        spec["rescale_acts_by_decoder_norm"] = bool(config.get("rescale_acts_by_decoder_norm", False))
    if about.get("model_name"):
        spec["model"] = about["model_name"]
    if about.get("hook_name"):
        spec["point"] = point_of(about["hook_name"])
    return spec


def point_of(hook: str) -> str:
    """The point of TransformerLens' name of a hook.

    Raises:
        RequestError: There is no such point.
    """
    point = canonical(hook)
    if not re.fullmatch(r"layers\.\d+\.[\w.]+", point):
        raise RequestError(f"{hook!r} is not a point of a layer; docs/points.md lists the hooks that are", "hook_name")
    return point
