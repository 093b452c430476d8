"""Values of transformers' own forward pass over a whole text, without a cache, read by plain hooks or by nnsight.

They share no code with the hooks that requests use, so that they can be compared with what requests record. Patterns,
queries and keys are those of eager attention, which alone shows them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from deployments.model.model import Model, import_nnsight
from deployments.places.attention_patterns import attending, configs_of
from deployments.places.hook_site import HookSite, Point

# Point -> [tokens, ...], for patterns [tokens, heads, tokens]; and `logits`, of which row i predicts token i.
Values = dict[str, torch.Tensor]
Changes = Mapping[Point, Callable[[torch.Tensor], torch.Tensor]]  # of rows [tokens, ...] in float32
ARGUMENTS = ("input", "ids", "weights")  # of a module, in this order: those of experts
HEADS = ("q", "k")  # the first arguments of a function of this name
EAGER = "eager_attention_forward"


@torch.inference_mode()
def by_hooks(hf: Any, ids: Sequence[int], points: Sequence[Point], changes: Changes = MappingProxyType({})) -> Values:
    """The values that plain forward hooks read at some points in a forward pass of [tokens] ids, after the changes."""
    seen: Values = {}
    for eager in (True, False):  # logits are those of the last
        here = [point for point in points if _needs_eager(point) == eager]
        if eager and not here:
            continue
        with ExitStack() as stack:
            if eager or any(point.place.side in HEADS for point in changes):
                stack.enter_context(attending(configs_of(hf), "eager"))
            acts = [(point, partial(_changed, point, change)) for point, change in changes.items()]
            acts += [(point, partial(_keep, seen, point)) for point in here]
            patches = [pair for pair in acts if pair[0].place.side in HEADS]  # the last gets arguments first
            for point, act in [*(pair for pair in acts if pair not in patches), *reversed(patches)]:
                _hook(stack, hf, point, act)
            logits = hf(input_ids=torch.tensor([list(ids)], device=hf.device), use_cache=False).logits
    return seen | {"logits": logits[0].roll(1, 0).float().cpu()}


@torch.inference_mode()
def by_nnsight(model: Model, ids: Sequence[int], points: Sequence[Point]) -> Values:
    """The same without changes, of inputs, outputs and patterns alone, read in nnsight's traces, which may fail."""
    nnsight, values = import_nnsight(), Values()
    points = [point for point in points if point.place.grows or point.place.side in ("input", "output")]
    for eager in sorted({False, *map(_needs_eager, points)}, reverse=True):
        modules = [(point, envoy_of(model, point.place)) for point in points if _needs_eager(point) == eager]
        seen: Values = {}
        with attending(configs_of(model.hf), "eager") if eager else nullcontext():  # noqa: SIM117 - nnsight reads its own block
            with model.nnsight.trace(torch.tensor([list(ids)], device=model.device), use_cache=False):
                for point, module in modules:
                    _keep(seen, point, module.input if point.place.side == "input" else module.output)
                found = nnsight.save(seen)
                logits = nnsight.save(model.nnsight.output.logits)
        values |= found
    return values | {"logits": logits[0].roll(1, 0).float().cpu()}


def _needs_eager(point: Point) -> bool:
    return point.place.grows or point.place.side in HEADS


def envoy_of(model: Model, place: HookSite) -> Any:
    """A place's module as nnsight has it."""
    found = model.nnsight
    for part in place.module.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    return found


def readable(hf: Any, point: Point) -> bool:
    """Whether `by_hooks` can read a point."""
    if point.place.side in HEADS:
        return hasattr(sys.modules[type(hf.get_submodule(point.place.module)).__module__], EAGER)
    return point.place.side in (*ARGUMENTS, "output", "logits")


def _hook(stack: ExitStack, hf: Any, point: Point, act: Callable[[Any], Any]) -> None:
    """Replace a point's value by what a function makes of it in forward passes, until the stack is closed."""
    module, side = hf.get_submodule(point.place.module), str(point.place.side)
    inside: list[Any] = []  # the module, while it runs

    def attended(function: Any, of: Any, *states: torch.Tensor, **options: Any) -> Any:
        if of is module:
            at = HEADS.index(side)
            states = (*states[:at], act(states[at].transpose(1, 2)).transpose(1, 2), *states[at + 1 :])
        return function(of, *states, **options)

    def multiplied(function: Any, *args: Any) -> Any:
        value = function(*args)
        if inside and value.shape[-1] == point.shape[-1]:
            inside.clear()
            return act(value)
        return value

    if side in HEADS:
        code = sys.modules[type(module).__module__]
        stack.enter_context(patch.object(code, EAGER, partial(attended, getattr(code, EAGER))))
    elif side == "logits":  # which a router computes and may not return
        stack.callback(module.register_forward_pre_hook(lambda of, _: inside.append(of)).remove)
        stack.callback(module.register_forward_hook(lambda *_: inside.clear()).remove)
        stack.enter_context(patch.object(functional, "linear", partial(multiplied, functional.linear)))
    elif side == "output" or point.place.grows:
        stack.callback(module.register_forward_hook(lambda _, args, output: act(output)).remove)
    elif side != "input" and point.place.module.endswith(".router"):  # its scores are zero but for chosen experts

        def scattered(_: Any, args: Any, output: Any) -> Any:
            weights, chosen = output[0].topk(point.shape[-1])
            new = act(chosen if side == "ids" else weights)
            return output if side == "ids" else (output[0].scatter(1, chosen, new), *output[1:])

        stack.callback(module.register_forward_hook(scattered).remove)
    else:

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            values, at = [*args, *kwargs.values()], ARGUMENTS.index(side)
            values[at] = act(values[at])
            return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)


def _keep(seen: Values, point: Point, value: Any) -> Any:
    if point.place.grows:
        rows = value[1][0].transpose(0, 1)  # [tokens, heads, tokens]
    else:
        rows = (value[0] if isinstance(value, (tuple, list)) else value).reshape(-1, *point.shape)
    seen[point.name] = rows.to("cpu", copy=True)  # later modules may overwrite it
    return value


def _changed(point: Point, change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    rows = value[0] if isinstance(value, (tuple, list)) else value
    new = change(rows.float().reshape(-1, *point.shape)).to(rows.dtype).view(rows.shape)
    return (new, *value[1:]) if isinstance(value, (tuple, list)) else new
