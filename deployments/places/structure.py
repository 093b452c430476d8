"""The structure of a model for clients: its capture points and its modules."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from torch import nn

from deployments.places.points import Points
from deployments.points.names import dtype_name


def structure(hf: Any, points: Points, context: int) -> dict[str, Any]:
    """A Hugging Face model's architecture, sizes, capture points and modules, as JSON; `context` is in tokens."""
    listed = sorted([*points, *points.more()], key=lambda point: point.place.order)
    return {
        "architecture": type(hf).__name__,
        "layers": points.layer_count,
        "hidden_size": hf.config.get_text_config().hidden_size,
        "max_model_len": context,
        "dtype": dtype_name(hf.dtype),
        "points": [
            {
                "name": point.name,
                "module": point.module,
                "shape": [*point.shape, "tokens"] if point.place.grows else list(point.shape),
                "dtype": dtype_name(point.place.dtype),
            }
            for point in listed
        ],
        "modules": _module("", hf),
    }


def _module(path: str, module: nn.Module) -> dict[str, Any]:
    """A module with its submodules; consecutive ones of the same structure are listed once, as `layers.0-27`.

    torch prints models in the same way; a model of thousands of modules then fits on a page.
    """
    children: list[dict[str, Any]] = []
    for (_, numbered), group in groupby(module.named_children(), lambda item: (_build(item[1]), item[0].isdecimal())):
        members = list(group)
        (first, child), (last, _) = members[0], members[-1]
        if numbered and first != last:
            members = [(f"{first}-{last}", child)]
        children += [_module(f"{path}.{name}" if path else name, child) for name, child in members]
    return {"path": path, "class": type(module).__name__} | ({"children": children} if children else {})


def _build(module: nn.Module) -> Any:
    """The structure that equal modules have in common."""
    own = [(name, tuple(weight.shape)) for name, weight in module.named_parameters(recurse=False)]
    return type(module), own, [(name, _build(child)) for name, child in module.named_children()]
