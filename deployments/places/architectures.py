"""The module names of each architecture, in tables, and checks that a model fits its table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

# A module's input or output, or the attention patterns beside an attention module's output.
Side = Literal["input", "output", "weights"]

# Canonical name -> the names of that part of a decoder layer in architectures.
LAYER_PARTS: dict[str, tuple[str, ...]] = {
    "attention": ("self_attn", "attn", "attention", "self_attention", "linear_attn"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe"),
    "input_layernorm": ("input_layernorm", "ln_1", "ln_attn", "self_attn_layer_norm"),
    # Gemma has both: its `post_attention_layernorm` norms the attention's output.
    "post_attention_layernorm": (
        *("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "ln_mlp", "final_layer_norm"),
    ),
}
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "dense", "out_proj")


def find_layers(model: Any, modules: dict[str, nn.Module]) -> str:
    """The path of the list of decoder layers."""
    depth = model.config.get_text_config().num_hidden_layers
    for path, module in modules.items():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return path
    raise ValueError(f"{type(model).__name__} has no list of {depth} decoder layers: this model cannot be served")


def canonical_modules(model: Any, modules: dict[str, nn.Module], paths: dict[int, str], layers: str) -> dict[str, str]:
    """Canonical module name -> the model's own path."""
    stem = layers.rpartition(".")[0]
    aliases = {"embed": paths[id(model.get_input_embeddings())], "lm_head": paths[id(model.get_output_embeddings())]}
    aliases.update(("norm", f"{stem}.{norm}") for norm in FINAL_NORMS if f"{stem}.{norm}" in modules)
    for i in range(len(modules[layers])):  # type: ignore[arg-type]
        aliases[f"layers.{i}"] = f"{layers}.{i}"
        for part, names in LAYER_PARTS.items():
            here = [f"{layers}.{i}.{name}" for name in names if f"{layers}.{i}.{name}" in modules]
            if here:
                aliases[f"layers.{i}.{part}"] = here[0]
    return aliases


def drop_misnamed_norms(aliases: dict[str, str], seen: Mapping[tuple[str, Side], torch.Tensor]) -> None:
    """Remove the names of norms that do not precede attention or the MLP.

    In some models (Exaone 4, OPT 350M), modules with these names normalize the output of a part.
    """
    inputs: dict[str, list[tuple[str, torch.Tensor]]] = {}  # layer -> inputs of its modules
    layers = {path for alias, path in aliases.items() if re.fullmatch(r"layers\.\d+", alias)}
    for (path, side), value in seen.items():
        layer = next((layer for layer in _ancestors(path) if layer in layers), None)
        if layer and side == "input":
            inputs.setdefault(layer, []).append((path, value))
    for alias in [alias for alias in aliases if alias.endswith("_layernorm")]:
        layer_alias, _, site = alias.rpartition(".")
        layer, norm = aliases[layer_alias], seen.get((aliases[alias], "output"))
        # Without a module for the MLP, its parts are in the layer itself.
        reader = aliases.get(f"{layer_alias}.attention" if site == "input_layernorm" else f"{layer_alias}.mlp", layer)
        read = [value for path, value in inputs.get(layer, ()) if f"{path}.".startswith(f"{reader}.")]
        if norm is None or not any(_same_values(norm, value) for value in read):
            del aliases[alias]


def _ancestors(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() == b.numel() and torch.equal(a.flatten().cpu(), b.flatten().cpu())


def head_shape(model: Any) -> tuple[int, int] | None:
    """(heads, head_dim) of the attention's value rows."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return None
    return heads, getattr(config, "head_dim", None) or config.hidden_size // heads
