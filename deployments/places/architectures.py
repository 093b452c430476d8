"""The module names of each architecture, in tables, and checks that a model fits its table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

# A module's input or output; the ids of the chosen experts; their weights, or attention patterns; queries; keys; what a
# router's linear map gives.
Side = Literal["input", "output", "ids", "weights", "q", "k", "logits"]
Key = tuple[str, Side]  # of a module, by its path
Values = Mapping[Key, torch.Tensor]  # of one forward pass, in order

# Names of modules that mix tokens: recurrent ones and convolutions, attention, and either. By their layer's kind in the
# config, some named as attention are none, and some of the last are attention.
RECURRENT = ("linear_attn", "mamba", "mamba_decoder.mamba", "short_conv", "conv", "mlstm_layer")
ATTENTION = ("self_attn", "attn", "attention", "self_attention", "multi_head_attention", "norm_attn_norm.attn")
MIXERS = ("mixer", "temporal_block")
NO_ATTENTION = ("linear_attention", "mamba", "conv", "recurrent")  # kinds of layers
NO_MIXER = ("moe", "mlp")
# Canonical name -> the names of that part of a decoder layer in architectures.
LAYER_PARTS: dict[str, tuple[str, ...]] = {
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "ffn", "mlp_block"),
    "input_layernorm": ("input_layernorm", "ln_1", "ln_attn", "self_attn_layer_norm"),
    # Gemma has both: its `post_attention_layernorm` norms the attention's output.
    "post_attention_layernorm": (
        *("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "ln_mlp", "final_layer_norm"),
    ),
}
# The same names -> why a layer has none.
ABSENT = {
    "attention": "its layer has no module for attention",
    "attention.heads": "no module reads its heads' outputs side by side",
    "attention.q": "its attention passes no queries to a function of transformers' registry",
    "attention.k": "its attention passes no keys to a function of transformers' registry, or layers share them",
    "mixer": "its layer has no module that mixes tokens",
    "mlp.router": "its layer has no router of experts, or one whose logits are no output of a linear map",
    "mlp.experts": "its layer has no module that receives the ids and weights of experts",
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


def canonical_modules(
    model: Any, modules: dict[str, nn.Module], paths: dict[int, str], layers: str
) -> tuple[dict[str, str], list[str]]:
    """Canonical module name -> the model's own path; and the kind of each layer."""
    stem = layers.rpartition(".")[0]
    aliases = {"embed": paths[id(model.get_input_embeddings())], "lm_head": paths[id(model.get_output_embeddings())]}
    aliases.update(("norm", f"{stem}.{norm}") for norm in FINAL_NORMS if f"{stem}.{norm}" in modules)
    depth, config = len(modules[layers]), model.config.get_text_config()  # type: ignore[arg-type]
    stated = getattr(config, "layer_types", None) or []
    kinds = [*stated] if len(stated) == depth else [""] * depth
    for i, kind in enumerate(kinds):
        layer = aliases[f"layers.{i}"] = f"{layers}.{i}"

        def here(names: Sequence[str], layer: str = layer) -> str:
            return next((name for name in names if f"{layer}.{name}" in modules), "")

        recurrent, attention, either = map(here, (RECURRENT, ATTENTION, MIXERS))
        parts = {part: here(names) for part, names in LAYER_PARTS.items()}
        if kind in NO_MIXER:
            parts["mlp"] = parts["mlp"] or either
        else:
            attends = kind not in NO_ATTENTION and (attention or (kind and either))
            parts |= {"attention": attends or "", "mixer": recurrent or attention or either}
            named = {"linear_attn": "linear_attention", "short_conv": "conv"}.get(recurrent, recurrent)
            kinds[i] = kind or named or ("attention" if attends else either and "recurrent") or "mlp"
        aliases.update((f"layers.{i}.{part}", f"{layer}.{name}") for part, name in parts.items() if name)
    return aliases, kinds


def inner_places(
    modules: Mapping[str, nn.Module], aliases: Mapping[str, str], seen: Values
) -> Iterator[tuple[str, Key]]:
    """(canonical name, module and side) of queries and keys, routers' logits, and experts' ids and weights.

    A router is the first linear map of a layer, outside its mixers, that gives a number for each expert.
    """
    for layer, keys in _by_layer(aliases, seen).items():
        mixers = tuple(f"{aliases.get(f'{layer}.{part}')}." for part in ("attention", "mixer"))
        inside = [path for path in modules if path.startswith(f"{aliases[layer]}.")]
        others = [modules[path] for path in inside if not f"{path}.".startswith(mixers)]
        experts = max(_stacks(others), default=0)
        for path, side in keys:
            is_linear = side == "logits" or (side == "output" and type(modules[path]).forward is nn.Linear.forward)
            if side in ("q", "k") and f"{path}.".startswith(mixers[0]):
                yield f"{layer}.attention.{side}", (path, side)
            elif f"{path}.".startswith(mixers):
                continue
            elif side in ("ids", "weights"):
                yield f"{layer}.mlp.experts.{side}", (path, side)
            elif is_linear and seen[path, side].shape[-1] == experts:
                yield f"{layer}.mlp.router", (path, side)


def _stacks(modules: Iterable[nn.Module]) -> Iterator[int]:
    """The numbers of experts in modules that may have any: of modules in a list, or of matrices in one tensor."""
    for module in modules:
        if isinstance(module, nn.ModuleList):
            yield len(module)
        elif not hasattr(module, "kernel_size"):  # of a convolution
            yield from (weight.shape[0] for weight in module.parameters(recurse=False) if weight.ndim > 2)


def check_norms(aliases: dict[str, str], seen: Values) -> None:
    """Remove the names of norms that do not precede attention or the MLP, and name those that do.

    In some models (Exaone 4, OPT 350M), modules with these names normalize the output of a part.
    """
    inside = _by_layer(aliases, seen)
    for alias in [alias for alias in aliases if alias.endswith("_layernorm")]:
        layer_alias, _, site = alias.rpartition(".")
        norm, part = seen.get((aliases[alias], "output")), "mixer" if site == "input_layernorm" else "mlp"
        # Without a module for the MLP, its parts are in the layer itself.
        reader = aliases.get(f"{layer_alias}.{part}", aliases[layer_alias])
        read = [seen[key] for key in inside[layer_alias] if key[1] == "input" and f"{key[0]}.".startswith(f"{reader}.")]
        if norm is None or not any(same_values(norm, value) for value in read):
            del aliases[alias]
    for layer, keys in inside.items():
        children = [of for of, side in keys if side == "output" and of.rpartition(".")[0] == aliases[layer]]
        for part, site in (("mixer", "input_layernorm"), ("mlp", "post_attention_layernorm")):
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
    """A mixer or the MLP of a layer."""

    names: list[str]  # of its output
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
        last = [branch.forms[-1] for branch in branches]
        # Of most, whether the MLP is after attention or beside it.
        if len(branches) > 1 and (aliases[layer], "output") in seen:
            branches = [] if _is_sum(branches[0].sums[0], branches[0].bases, last) else branches
        for branch in branches:
            if any(_is_sum(total, branch.bases, [form]) for total in branch.sums for form in branch.forms):
                continue
            reason = f"what this model adds to the residual stream is not the output of {branch.module} alone"
            if branch.stream is not None and same_values(branch.forms[0], branch.stream):
                reason = f"in this model, {branch.module} adds the residual stream itself"
            yield from ((name, reason) for name in branch.names)


def _branches(alias: str, keys: Sequence[Key], aliases: Mapping[str, str], seen: Values) -> Iterator[_Branch]:
    layer = aliases[alias]
    end: Key = (layer, "output")
    reader = aliases.get(f"{alias}.post_attention_layernorm") or aliases.get(f"{alias}.mlp")
    middle: Key = (reader, "input") if reader else end
    own_modules = {part: aliases.get(f"{alias}.{part}", "") for part in ("mixer", "attention", "mlp")}
    for module in dict.fromkeys(own_modules.values()):
        if (module, "output") not in seen:
            continue
        parts = [part for part, own in own_modules.items() if own == module]
        norm, stream = ("post_attention_layernorm", end) if "mlp" in parts else ("input_layernorm", middle)
        output = seen[module, "output"]
        later = keys[keys.index((module, "output")) + 1 :]
        read = [seen[key] for key in later if key[1] == "input"]
        norms = {path for path, side in later if side == "input" and same_values(seen[path, side], output)}
        own: Key = (module, "input")
        first: Key = (aliases.get(f"{alias}.{norm}", module), "input")
        bases = dict.fromkeys([first, own, (layer, "input")])
        # What reads the same as the part is no sum.
        sums = [value for value in read if own not in seen or not same_values(value, seen[own])]
        yield _Branch(
            [f"{alias}.{part}.output" for part in parts],
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
    """Canonical name of a layer -> the sides of modules in it, in order."""
    layers = {path: alias for alias, path in aliases.items() if re.fullmatch(r"layers\.\d+", alias)}
    found: dict[str, list[Key]] = {alias: [] for alias in layers.values()}
    for path, side in seen:
        stem = path
        while (stem := stem.rpartition(".")[0]) and stem not in layers:
            pass
        if stem:
            found[layers[stem]].append((path, side))
    return found


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
