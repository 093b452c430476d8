"""Observes each module's input and output in one forward pass, and whether their rows are tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from deployments.places.architectures import Key, Side, Values
from deployments.places.attention_patterns import eagerly, showing
from deployments.places.hook_site import HookSite


def first_tensor(value: Any) -> torch.Tensor | None:
    """The tensor of a module's value: itself, or the first of a tuple; None if there is none."""
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


def attention_weights(value: Any) -> torch.Tensor | list[torch.Tensor] | None:
    """Attention patterns in an output, [batch, heads, queries, keys] or a list of packed [heads, ...]; or None."""
    weights = value[1] if isinstance(value, tuple) and len(value) > 1 else None
    is_batch = isinstance(weights, torch.Tensor) and weights.ndim == 4
    return weights if is_batch or isinstance(weights, list) else None


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module's first argument; None without any."""
    return next(iter((*args, *kwargs.values())), None)


def with_first_argument(args: tuple[Any, ...], kwargs: dict[str, Any], new: Any) -> tuple[Any, dict[str, Any]]:
    """A module's arguments with another first one."""
    if args:
        return (new, *args[1:]), kwargs
    return args, kwargs | {next(iter(kwargs)): new}


def with_first(value: Any, new: torch.Tensor) -> Any:
    """A module's value with another tensor instead of itself, or of a tuple's first."""
    return new if isinstance(value, torch.Tensor) else type(value)((new, *value[1:]))


def watch(model: Any, ids: torch.Tensor) -> dict[Key, torch.Tensor]:
    """(module path, side) -> its value in one forward pass, for modules that are called once, in order."""
    seen: dict[Key, torch.Tensor | None] = {}
    calls: Counter[Key] = Counter()

    def note(path: str, side: Side, tensor: Any) -> None:
        calls[path, side] += 1
        seen[path, side] = None if tensor is None else tensor.clone()  # other modules may overwrite it

    def before(path: str) -> Any:
        return lambda _, args, kwargs: note(path, "input", first_tensor(first_argument(args, kwargs)))

    def after(path: str) -> Any:
        def hook(_: Any, args: Any, output: Any) -> None:
            note(path, "output", first_tensor(output))
            note(path, "weights", attention_weights(output))

        return hook

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if path:
                hooks.callback(module.register_forward_pre_hook(before(path), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after(path)).remove)
        hooks.enter_context(showing(dict.fromkeys(model.modules(), range(len(ids)))))
        model(input_ids=ids, use_cache=False)
    return {key: value for key, value in seen.items() if value is not None and calls[key] == 1}


def carried_on(model: Any, ids: torch.Tensor, readers: Mapping[str, str], seen: Values) -> set[str]:
    """The layers to whose output the input of their reader is added: a change of it in place changes the output.

    Args:
        model: The model.
        ids: [batch, tokens] of the forward pass.
        readers: Path of a layer -> path of the module in it whose input may be the residual stream.
        seen: (module path, side) -> its value in a forward pass of `ids`, as of `watch`.
    """
    found = set()

    def before(size: torch.Tensor) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = first_argument(args, kwargs)
            if not isinstance(value, torch.Tensor) or not value.is_contiguous():
                return None
            own = value.clone()
            value += size.to(value.device)  # seen by all but the reader
            return with_first_argument(args, kwargs, own)

        return hook

    def after(layer: str, wanted: torch.Tensor) -> Any:
        def hook(_: Any, args: Any, output: Any) -> Any:
            value = first_tensor(output)
            if value is None or value.shape != wanted.shape:
                return None
            change = (value - wanted).flatten(0, -2)  # of the stream: the same at each token
            if change.any() and _mostly_near(change[:1].expand_as(change), change, 0.3):
                found.add(layer)
            return with_first(output, wanted.clone())  # later layers are as before

        return hook

    with ExitStack() as hooks:
        for layer, reader in readers.items():
            wanted = seen[layer, "output"]
            size = wanted.abs().max()  # larger than rounding, also of massive values
            modules = model.get_submodule(reader), model.get_submodule(layer)
            hooks.callback(modules[0].register_forward_pre_hook(before(size), with_kwargs=True).remove)
            hooks.callback(modules[1].register_forward_hook(after(layer, wanted)).remove)
        if readers:
            model(input_ids=ids, use_cache=False)
    return found


def drop_wrong_patterns(seen: dict[Key, torch.Tensor], model: Any, ids: torch.Tensor) -> None:
    """Remove observed patterns of a forward pass of `ids` [batch, tokens] that differ from those of eager attention.

    An architecture's attention may do more than recomputed patterns show.
    """
    patterns = {key: value for key, value in seen.items() if key[1] == "weights"}
    if not patterns:
        return
    with eagerly(model):
        wanted = watch(model, ids)
    for key, value in patterns.items():
        want = wanted.get(key)
        tolerance = 1e-3 if value.dtype == torch.float32 else 0.1  # rounding accumulates through the layers
        if want is None or want.shape != value.shape or not _mostly_near(want, value, tolerance):
            del seen[key]


def place_of(path: str, side: Side, order: int, value: torch.Tensor, ids: torch.Tensor) -> HookSite | None:
    """The place of a value in a forward pass of `ids` [batch, tokens]; None if it has no row for each token."""
    if side == "weights":
        shape = value.shape[:1] + value.shape[2:]
        patterns = shape == (*ids.shape, ids.shape[1]) and _are_patterns(value)
        return HookSite(path, side, order, "patterns", (value.shape[1],), value.dtype) if patterns else None
    if value.ndim < 2:
        return None
    if value.shape[:2] == ids.shape:
        if value.ndim == 2 and not (value == ids.to(value.device)).all():
            return None  # a mask, which has another shape in other forward passes
        return HookSite(path, side, order, "batched", tuple(value.shape[2:]) or (1,), value.dtype)
    if value.shape[0] == ids.numel():
        return HookSite(path, side, order, "flat", tuple(value.shape[1:]), value.dtype)
    return None


def by_tokens(place: HookSite, value: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A place's value in a forward pass of `ids` [batch, tokens], as [batch, tokens, ...]."""
    return value.transpose(1, 2) if place.grows else value.reshape(*ids.shape, *place.shape)


def _are_patterns(value: torch.Tensor) -> bool:
    """Whether values [batch, heads, tokens, tokens] sum to 1 over each token and those before, and are 0 after it."""
    if value.shape[2] != value.shape[3] or not value.is_floating_point():
        return False
    sums = value.float().sum(-1)
    return bool((value.triu(1) == 0).all()) and bool(((sums - 1).abs() < 0.02).all())  # rounded, in bfloat16


def follows_tokens(value: torch.Tensor, again: torch.Tensor) -> bool:
    """Whether most tokens have the same values [batch, tokens, ...] in `again`; a few may round to another expert.

    Rows that a router has reordered do not.
    """
    return _mostly_near(value.flatten(2), again.flatten(2), 0.1)


def _mostly_near(value: torch.Tensor, again: torch.Tensor, tolerance: float) -> bool:
    """Whether most rows [..., row] differ by no more than `tolerance` of their norm."""
    value, again = value.float(), again.float()
    near = (value - again).norm(dim=-1) <= tolerance * value.norm(dim=-1)
    return bool(near.float().mean() > 0.5)
