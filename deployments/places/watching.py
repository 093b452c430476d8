"""Observes each module's input and output in one forward pass, and whether their rows are tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, get_args

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from deployments.places.architectures import Key, Side, Values
from deployments.places.attention_patterns import VISITED, VISITS, attending, configs_of, showing
from deployments.places.hook_site import HookSite

EXPERT_SIDES: tuple[Side, ...] = ("ids", "weights")
HEAD_SIDES: tuple[Side, ...] = ("q", "k")
See = Callable[[Any], Any]  # gets a value, and returns its replacement or None


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


def argument_of(side: Side, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Any]:
    """The position or name of the argument of a module that a side is, and its value; None without any.

    The input is the first argument. Ids and weights of experts are integers [rows, k] and floats of the same shape.
    """
    given = dict[int | str, Any](enumerate(args)) | kwargs
    if side == "input":
        return next(iter(given.items()), (0, None))
    tables = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and value.ndim == 2}
    for name, ids in tables.items():
        for other, weights in tables.items():
            if not ids.is_floating_point() and weights.is_floating_point() and ids.shape == weights.shape:
                return (name, ids) if side == "ids" else (other, weights)
    return 0, None


def with_first(value: Any, new: torch.Tensor) -> Any:
    """A module's value with another tensor instead of itself, or of a tuple's first."""
    return new if isinstance(value, torch.Tensor) else type(value)((new, *value[1:]))


def sparse_scores(router: torch.nn.Module, output: Any) -> tuple[torch.Tensor, int] | None:
    """Scores [rows, experts], zero but for k chosen experts, and k, of a router that returns (scores, logits)."""
    tables = output if isinstance(output, tuple) and len(output) == 2 else ()
    shapes = [table.shape for table in tables if isinstance(table, torch.Tensor) and table.ndim == 2]
    chosen = getattr(router, "top_k", None) if len(shapes) == 2 and shapes[0] == shapes[1] else None
    return (output[0], chosen) if isinstance(chosen, int) and 0 < chosen < shapes[0][1] else None


class _LinearMaps(TorchFunctionMode):
    """Within a module's forward pass, shows what `torch.nn.functional.linear` returns, and may replace it.

    Routers compute their logits by it, and return them only beside the experts that they have chosen.
    """

    def __init__(self, see: See) -> None:
        super().__init__()
        self._see, self._entered = see, ExitStack()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        new = self._see(value) if func is functional.linear else None
        return value if new is None else new

    def begin(self, *_: Any) -> None:
        """Enter it, as a module's hook before its forward pass."""
        self._entered.enter_context(self)

    def end(self, *_: Any) -> None:
        """Leave it, as a module's hook after its forward pass, even if that never began."""
        self._entered.close()


def listen(module: torch.nn.Module, side: Side, see: See) -> ExitStack:
    """Show one side of a module's calls to a function, which may return another value, until the stack is closed."""
    stack = ExitStack()

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        argument, value = argument_of(side, args, kwargs)
        new = see(value)
        if new is None:
            return None
        if isinstance(argument, int):
            return (*args[:argument], new, *args[argument + 1 :]), kwargs
        return args, kwargs | {argument: new}

    def after(_: Any, args: Any, output: Any) -> Any:
        if side == "output":
            return see(output)
        if side == "weights" and (patterns := attention_weights(output)) is not None:
            return see(patterns)
        if (found := sparse_scores(module, output)) is None:
            return None
        weights, ids = (scores := found[0]).topk(found[1])
        new = see(ids if side == "ids" else weights)
        return None if new is None else with_first(output, scores.scatter(1, ids, new))

    if side in HEAD_SIDES:
        visits = module.__dict__.setdefault(VISITS, {})
        visits[side] = see
        stack.callback(visits.pop, side)
    elif side == "logits":
        maps = _LinearMaps(see)
        stack.callback(module.register_forward_pre_hook(maps.begin).remove)
        stack.callback(module.register_forward_hook(maps.end, always_call=True).remove)
    if side in ("input", *EXPERT_SIDES):
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    if side in ("output", *EXPERT_SIDES):
        stack.callback(module.register_forward_hook(after).remove)
    return stack


def watch(model: Any, ids: torch.Tensor) -> dict[Key, torch.Tensor]:
    """(module path, side) -> its value in one forward pass, for modules that are called once, in order."""
    seen: dict[Key, torch.Tensor] = {}
    calls: Counter[Key] = Counter()
    running: list[str] = []  # paths of modules, the innermost last

    def note(path: str, side: Side, value: Any) -> None:
        if side == "input":
            running.append(path)
        elif side == "output":
            running.pop()
        tensor = first_tensor(value)
        if tensor is not None and (side != "logits" or path == running[-1]):
            calls[path, side] += 1
            seen[path, side] = tensor.clone()  # other modules may overwrite it

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            for side in get_args(Side) if path else ():
                if side != "logits" or type(module).forward is not torch.nn.Linear.forward:  # those are its output
                    hooks.enter_context(listen(module, side, partial(note, path, side)))
        hooks.enter_context(showing(dict.fromkeys(model.modules(), range(len(ids)))))
        model(input_ids=ids, use_cache=False)
    once = {key: value for key, value in seen.items() if calls[key] == 1}
    numbers = {key: value.float().cpu().numpy().tobytes() for key, value in once.items() if key[1] == "k"}
    layers = Counter(numbers.values())  # that read the same keys: a change would be lost, or change the others
    return {key: value for key, value in once.items() if key not in numbers or layers[numbers[key]] == 1}


def carried_on(model: Any, ids: torch.Tensor, readers: Mapping[str, str], seen: Values) -> set[str]:
    """The layers to whose output the input of their reader is added: a change of it in place changes the output.

    `readers` has the path of the module in each layer whose input may be the residual stream, and `seen` the values of
    a forward pass of `ids` [batch, tokens] from `watch`.
    """
    found = set()

    def before(size: torch.Tensor, value: Any) -> torch.Tensor | None:
        if not isinstance(value, torch.Tensor) or not value.is_contiguous():
            return None
        own = value.clone()
        value += size.to(value.device)  # seen by all but the reader
        return own

    def after(layer: str, wanted: torch.Tensor, output: Any) -> Any:
        value = first_tensor(output)
        if value is None or value.shape != wanted.shape:
            return None
        change = (value - wanted).flatten(0, -2)  # of the stream: the same at each token
        if change.any() and _mostly_near(change[:1].expand_as(change), change, 0.3):
            found.add(layer)
        return with_first(output, wanted.clone())  # later layers are as before

    with ExitStack() as hooks:
        for layer, reader in readers.items():
            wanted = seen[layer, "output"]
            size = wanted.abs().max()  # larger than rounding, also of massive values
            hooks.enter_context(listen(model.get_submodule(reader), "input", partial(before, size)))
            hooks.enter_context(listen(model.get_submodule(layer), "output", partial(after, layer, wanted)))
        if readers:
            model(input_ids=ids, use_cache=False)
    return found


def drop_wrong_patterns(seen: dict[Key, torch.Tensor], model: Any, ids: torch.Tensor) -> None:
    """Remove observed patterns of a forward pass of `ids` [batch, tokens] that differ from those of eager attention.

    An architecture's attention may do more than recomputed patterns show.
    """
    patterns = {key: value for key, value in seen.items() if key[1] == "weights" and value.ndim == 4}
    if not patterns:
        return
    with attending(configs_of(model), "eager"):
        wanted = watch(model, ids)
    for key, value in patterns.items():
        want = wanted.get(key)
        tolerance = 1e-3 if value.dtype == torch.float32 else 0.1  # rounding accumulates through the layers
        if want is None or want.shape != value.shape or not _mostly_near(want, value, tolerance):
            del seen[key]


def with_heads(seen: dict[Key, torch.Tensor], model: Any, ids: torch.Tensor) -> dict[Key, torch.Tensor]:
    """Values of a forward pass of `ids`, and queries and keys, which eager attention passes to no registered function.

    These are of a forward pass with other attention, and show where there are any and in which shapes.
    """
    if any(side == "q" for _, side in seen):
        return seen
    with attending(configs_of(model), VISITED):
        shown = watch(model, ids)
    return {key: seen.get(key, value) for key, value in shown.items() if key in seen or key[1] in HEAD_SIDES} | seen


def place_of(path: str, side: Side, order: int, value: torch.Tensor, ids: torch.Tensor) -> HookSite | None:
    """The place of a value in a forward pass of `ids` [batch, tokens]; None if it has no row for each token."""
    if side == "weights" and value.ndim == 4:
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
