"""The module names of each architecture, in tables, and checks that a model fits its table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

# A module's input or output, or the attention patterns beside an attention module's output.
Side = Literal["input", "output", "weights"]
Key = tuple[str, Side]  # of a module, by its path
Values = Mapping[Key, torch.Tensor]  # of one forward pass, in order

# Canonical name -> the names of that part of a decoder layer in architectures.
LAYER_PARTS: dict[str, tuple[str, ...]] = {
    "attention": ("self_attn", "attn", "attention", "self_attention", "linear_attn", "multi_head_attention"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "ffn"),
    "input_layernorm": ("input_layernorm", "ln_1", "ln_attn", "self_attn_layer_norm"),
    # Gemma has both: its `post_attention_layernorm` norms the attention's output.
    "post_attention_layernorm": (
        *("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "ln_mlp", "final_layer_norm"),
    ),
}
# The same names -> why a layer has none.
ABSENT = {
    "attention": "its layer has no module for attention",
    "mlp": "its layer has no module for the MLP",
    "input_layernorm": "its attention reads no norm's output",
    "post_attention_layernorm": "its MLP reads no norm's output, or the one that attention reads",
}
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
# The largest difference of a sum from its parts, relative to a row's norm.
SUM_TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MOST_FEATURES = 512  # of the rows of a sum that is tested
OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "dense", "out_proj", "attention.out_proj", "Wo")


def find_layers(model: Any, modules: dict[str, nn.Module], seen: Values) -> str:
    """The path of the list of decoder layers, which run on text."""
    depth = model.config.get_text_config().num_hidden_layers
    ran = {path.rpartition(".")[0] for path, _ in seen}
    for path, module in modules.items():
        if isinstance(module, nn.ModuleList) and len(module) == depth and path in ran:
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


def check_norms(aliases: dict[str, str], seen: Values) -> None:
    """Remove the names of norms that do not precede attention or the MLP, and name those that do.

    In some models (Exaone 4, OPT 350M), modules with these names normalize the output of a part.
    """
    inside = _by_layer(aliases, seen)
    for alias in [alias for alias in aliases if alias.endswith("_layernorm")]:
        layer_alias, _, site = alias.rpartition(".")
        layer, norm = aliases[layer_alias], seen.get((aliases[alias], "output"))
        # Without a module for the MLP, its parts are in the layer itself.
        reader = aliases.get(f"{layer_alias}.attention" if site == "input_layernorm" else f"{layer_alias}.mlp", layer)
        read = [seen[key] for key in inside[layer] if key[1] == "input" and f"{key[0]}.".startswith(f"{reader}.")]
        if norm is None or not any(same_values(norm, value) for value in read):
            del aliases[alias]
    for path, keys in inside.items():
        layer = next(alias for alias, of in aliases.items() if of == path)
        children = [of for of, side in keys if side == "output" and of.rpartition(".")[0] == path]
        for part, site in (("attention", "input_layernorm"), ("mlp", "post_attention_layernorm")):
            wanted = seen.get((aliases.get(f"{layer}.{part}", ""), "input"))
            if wanted is None or f"{layer}.{site}" in aliases:
                continue
            for of in children:
                before, after = seen.get((of, "input")), seen[of, "output"]
                if before is None or not same_values(after, wanted) or same_values(before, after):
                    continue  # a dropout, for example
                if of not in aliases.values():
                    aliases[f"{layer}.{site}"] = of


@dataclass(frozen=True)
class _Branch:
    """Attention or the MLP of a layer."""

    name: str  # of its output
    module: str
    bases: list[torch.Tensor]  # what its norm reads, and what it reads: one of them is the residual stream
    forms: list[torch.Tensor]  # its output, and those of norms after it
    sums: list[torch.Tensor]  # the layer's output, and what later modules of the layer read
    stream: torch.Tensor | None  # the residual stream after it


def missing_branches(aliases: Mapping[str, str], seen: Values) -> Iterator[tuple[str, str]]:
    """(name, reason) of the outputs of attention and the MLP that are not what the layer adds to the residual stream.

    A layer may scale or norm an output before it adds it, and norm the sum.
    """
    for layer, keys in _by_layer(aliases, seen).items():
        branches = list(_branches(layer, keys, aliases, seen))
        if len(branches) == 2:  # of most architectures, whether the MLP is after attention or beside it
            attention, mlp = branches
            if (layer, "output") in seen and _is_sum(
                attention.sums[0], attention.bases, [attention.forms[-1], mlp.forms[-1]]
            ):
                continue
        for branch in branches:
            if any(_is_sum(total, branch.bases, [form]) for total in branch.sums for form in branch.forms):
                continue
            if branch.stream is not None and same_values(branch.forms[0], branch.stream):
                yield branch.name, f"in this model, {branch.module} adds the residual stream itself"
            else:
                yield (
                    branch.name,
                    f"what this model adds to the residual stream is not the output of {branch.module} alone",
                )


def _branches(layer: str, keys: Sequence[Key], aliases: Mapping[str, str], seen: Values) -> Iterator[_Branch]:
    alias = next(alias for alias, path in aliases.items() if path == layer)
    end: Key = (layer, "output")
    middle: Key = (aliases.get(f"{alias}.post_attention_layernorm") or aliases.get(f"{alias}.mlp", ""), "input")
    for part, norm, stream in (("attention", "input_layernorm", middle), ("mlp", "post_attention_layernorm", end)):
        module = aliases.get(f"{alias}.{part}", "")
        if (module, "output") not in seen:
            continue
        output = seen[module, "output"]
        later = keys[keys.index((module, "output")) + 1 :]
        read = [seen[key] for key in later if key[1] == "input"]
        norms = {path for path, side in later if side == "input" and same_values(seen[path, side], output)}
        own: Key = (module, "input")
        bases: list[Key] = list(
            dict.fromkeys([(aliases.get(f"{alias}.{norm}", module), "input"), own, (layer, "input")])
        )
        # What reads the same as the part is no sum.
        sums = [value for value in read if own not in seen or not same_values(value, seen[own])]
        yield _Branch(
            f"{alias}.{part}.output",
            module,
            [seen[key] for key in bases if key in seen],
            [output, *(seen[path, side] for path, side in later if side == "output" and path in norms)],
            [*([seen[end]] if end in seen else []), *sums],
            seen.get(stream),
        )


def _is_sum(total: torch.Tensor, bases: Iterable[torch.Tensor], added: Iterable[torch.Tensor]) -> bool:
    """Whether most rows are a sum of factors, the same for all rows, of bases and `added`, with a base among them."""
    bases, added = ([term for term in terms if term.numel() == total.numel()] for terms in (bases, added))
    if not bases or not added or total.dtype not in SUM_TOLERANCE:
        return False
    rows = [value.reshape(-1, total.shape[-1])[:, :MOST_FEATURES].cpu().double() for value in (total, *bases, *added)]
    size = rows[0].norm(dim=-1, keepdim=True).clamp_min(1e-9)
    wanted, *terms = [(value / size).flatten() for value in rows]
    parts = torch.stack(terms, 1)
    if not (parts.isfinite().all() and wanted.isfinite().all()):
        return False
    factors = torch.linalg.lstsq(parts, wanted[:, None], driver="gelsd").solution
    rest = (wanted - (parts @ factors)[:, 0]).view(len(size), -1).norm(dim=-1)
    return bool(rest.median() <= SUM_TOLERANCE[total.dtype]) and bool(factors[: len(bases)].abs().max() > 1e-3)


def _by_layer(aliases: Mapping[str, str], seen: Values) -> dict[str, list[Key]]:
    """Path of a layer -> the modules' sides in it, in order."""
    found: dict[str, list[Key]] = {path: [] for alias, path in aliases.items() if re.fullmatch(r"layers\.\d+", alias)}
    for path, side in seen:
        if layer := next((layer for layer in _ancestors(path) if layer in found), None):
            found[layer].append((path, side))
    return found


def _ancestors(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same values in the same order, in any shape and on any device."""
    return a.numel() == b.numel() and torch.equal(a.flatten().cpu(), b.flatten().cpu())


def head_shape(model: Any, attention: nn.Module, width: int) -> tuple[int, int] | None:
    """(heads, head_dim) of an attention module's value rows, `width` numbers in all; None if they do not fit."""
    sizes = [getattr(attention, name, None) for name in ("v_head_dim", "head_dim")]  # layers may differ
    if not any(sizes):
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        sizes = [getattr(config, "head_dim", None), config.hidden_size // heads if heads else None]
    size = next(filter(None, sizes), None)
    return (width // size, size) if size and width % size == 0 else None
