"""Direct logit attribution: the parts that a model's components add to a logit, through the residual stream alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from deployments.errors import RequestError
from deployments.model.model import Model
from deployments.places.hook_site import Point
from deployments.places.watching import first_tensor, listen, with_first

By = Literal["layer", "head", "neuron"]
MOST_TOKENS = 1024  # of a prompt: like a prefill, the forward pass holds up all other requests
ROUNDING = 3e-2  # of the parts' sum in half precision, relative to the sum of their sizes; 1e-4 in float32


def attribute(
    model: Model, prompt: Sequence[int], targets: Sequence[int], by: By
) -> tuple[float, dict[str, list[float]]]:
    """Divide a logit, before a soft cap, into parts, by a forward pass and a backward pass along the residual stream.

    Each component's output is a leaf of the backward pass, so that its gradient is the direction in which the
    component changes the logit directly: through additions, scales and norms, but through no other component. Only the
    thread that owns the model may call it.

    Args:
        model: The model.
        prompt: The prompt's token ids.
        targets: The token's id, or two ids for the difference of their logits.
        by: What the parts are: attention and MLP of each layer, the former divided into heads, or the latter into
            neurons.

    Returns:
        The logit, and for each component one part, or one for each head or neuron.

    Raises:
        RequestError: The prompt is too long, the model has no such points, or its parts do not add up to the logit.
    """
    check_length(prompt)
    cuts = _cuts(model, by)
    # What is added to each row, or to each row at a position.
    constants = [("bias", weight) for path, weight in model.hf.named_parameters() if path.endswith("bias")]
    tables = [module for module in model.hf.modules() if isinstance(module, nn.Embedding)]
    constants += [("positions", table.weight) for table in tables if table is not model.hf.get_input_embeddings()]
    for _, weight in constants:
        weight.requires_grad_()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            logits, leaves = _forward(model, prompt, cuts)
            logit = logits[targets[0]] - logits[[*targets[1:]]].sum()
            values = [*leaves.items(), *constants]
            grads = torch.autograd.grad(logit, [value for _, value in values], materialize_grads=True)
    finally:
        for _, weight in constants:
            weight.requires_grad_(False)
    parts: dict[str, list[float]] = {}
    for (name, value), grad in zip(values, grads, strict=True):
        product = value.detach().float() * grad.float()
        if name not in cuts:
            parts[name] = [sum(parts.get(name, [])) + product.sum().item()]
            continue
        row = product.view(-1, *cuts[name].shape)[-1]
        parts[name] = (row if name.endswith("neurons") else row.sum(-1).view(-1)).tolist()
    numbers = torch.tensor([number for part in parts.values() for number in part], dtype=torch.float64)
    tolerance = 1e-4 if model.dtype == torch.float32 else ROUNDING
    if not abs(numbers.sum() - logit.item()) <= tolerance * numbers.abs().sum():
        message = (
            f"the parts add up to {numbers.sum():.4g}, but the logit is {logit:.4g}: this model's residual stream is "
            "more than the sum of its embedding and these parts, or one of its norms has another form"
        )
        raise RequestError(message, "by", "attribution_unsupported")
    return logit.item(), parts


def check_length(prompt: Sequence[int]) -> None:
    """Raise RequestError if a prompt is empty or too long."""
    if not 0 < len(prompt) <= MOST_TOKENS:
        raise RequestError(f"attribution takes 1 to {MOST_TOKENS} tokens, not {len(prompt)}", "prompt")


def _cuts(model: Model, by: By) -> dict[str, Point]:
    """The point of each part; RequestError if no layer has heads, or neurons."""
    points = model.points
    known = {point.name: point for point in (*points, *points.more())}
    linear = (nn.Linear, Conv1D)
    maps = [p for p in points if p.place.side == "input" and isinstance(model.hf.get_submodule(p.place.module), linear)]
    cuts = {"embed": points.named("embed.output", "by")[0]}
    for layer in range(points.layer_count):
        places = set()
        for part in ("attention", "mixer", "mlp"):
            name = f"layers.{layer}.{part}"
            point = known.get(f"{name}.output")
            if point is None or point.place in places:  # attention is a mixer, too
                continue
            places.add(point.place)
            within = [own for own in maps if own.place.module.rpartition(".")[0] == point.place.module]
            if (by, part) == ("head", "attention") and f"{name}.heads" in known:
                name, point = f"{name}.heads", known[f"{name}.heads"]
            elif (by, part) == ("neuron", "mlp") and within:
                name, point = f"{name}.neurons", within[-1]
            cuts[name] = point
    if by != "layer" and not any(name.endswith(f"{by}s") for name in cuts):
        raise RequestError(f"no layer of this model has a point of {by}s: choose by=layer", "by")
    return cuts


def _forward(
    model: Model, prompt: Sequence[int], cuts: Mapping[str, Point]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The last token's logits [vocabulary] before a soft cap, and the value at each cut.

    The logits depend linearly on the values at the cuts and on the constants, and on nothing else.
    """
    leaves: dict[str, torch.Tensor] = {}
    before: list[torch.Tensor] = []  # the head's output

    def cut(name: str, value: Any) -> Any:
        tensor = first_tensor(value)
        assert tensor is not None  # it is a point
        leaves[name] = tensor.detach().requires_grad_()
        return with_first(value, leaves[name].clone())  # modules may change it in place

    with ExitStack() as stack:
        for name, point in cuts.items():
            module = model.hf.get_submodule(point.place.module)
            stack.enter_context(listen(module, point.place.side, partial(cut, name)))
        head = model.hf.get_submodule(model.head)
        stack.callback(head.register_forward_pre_hook(lambda _, args: (args[0][:, -1:], *args[1:])).remove)
        stack.enter_context(listen(head, "output", before.append))
        ids = torch.tensor([list(prompt)], device=model.device)
        with _FrozenNorms():
            logits = model.hf(input_ids=ids, use_cache=False).logits.flatten().float()
    own = before[0].flatten().float()
    scale = (logits @ own / (own @ own)).detach()  # some models multiply the head's output
    is_scaled = torch.allclose(logits, scale * own, rtol=1e-3, atol=1e-3 * logits.abs().max().item())
    return logits if is_scaled else own, leaves


class _FrozenNorms(TorchFunctionMode):
    """Makes norms linear: the root by which they divide a row counts as a constant."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "layer_norm":
            return _layer_norm(*args, **kwargs)
        result = func(*args, **kwargs)
        is_root = name in ("rsqrt", "sqrt") or (name == "pow" and isinstance(args[-1], float) and args[-1] < 0)
        return result.detach() if is_root else result


def _layer_norm(x: torch.Tensor, _: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *__: Any) -> Any:
    """`torch.layer_norm` over the last axis, with a constant divisor."""
    rows = x.float() - x.float().mean(-1, keepdim=True)
    rows = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt().detach()
    rows = rows if weight is None else rows * weight
    return (rows if bias is None else rows + bias).to(x.dtype)
