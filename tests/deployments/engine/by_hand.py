"""Independent implementations of edits for comparison: as plain forward hooks, and as an nnsight trace."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from deployments.engine.edits import Edit
from deployments.model.model import Model, import_nnsight
from deployments.model.references import by_hooks, envoy_of
from deployments.places.hook_site import HookSite, Point
from deployments.points.capture import Capture

Values = dict[str, torch.Tensor]  # point name -> [tokens, ...]


def point(model: Model, name: str) -> Point:
    (found,) = model.points.resolve(Capture(points=[name]))
    return found


def one(edit: Edit, x: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
    match edit.kind:
        case "add":
            return x + v
        case "scale":
            return x * edit.low
        case "project_out":
            return x - torch.dot(x, v) / torch.dot(v, v) * v
        case "clamp":
            return x.clamp(edit.low, edit.high)
        case "replace":
            return v


def by_hand(edit: Edit, rows: torch.Tensor) -> torch.Tensor:
    """Rows [tokens, ...] of a point with an edit."""
    rows = rows.clone()
    for turn, position in enumerate(edit.tokens.within(0, len(rows))):
        x = rows[position]
        features = list(range(x.shape[-1])) if edit.features is None else list(edit.features)
        heads = edit.heads or (range(len(x)) if x.ndim > 1 else [None])
        for k, head in enumerate(heads):
            row = x if head is None else x[head]
            v = None
            if edit.vector is not None:
                v = edit.vector[turn] if edit.per_token else edit.vector
                v = (v[k] if v.ndim > 1 else v).float()
            row[features] = one(edit, row[features].float(), v).to(row.dtype)
    return rows


def _in_order(edits: Sequence[Edit]) -> dict[HookSite, list[Edit]]:
    """Edits by their places, these in the order in which a forward reaches them."""
    places = sorted({edit.point.place for edit in edits}, key=lambda place: place.order)
    return {place: [edit for edit in edits if edit.point.place == place] for place in places}


def _changed(value: Any, edits: Sequence[Edit], seen: Values) -> Any:
    """What takes the place of a module's value of one sequence; says in `seen` what it is at each point."""
    tensor = value[0] if isinstance(value, tuple) else value
    new = _each(edits, tensor)
    for at in {edit.point for edit in edits}:
        seen[at.name] = new.reshape(-1, *at.shape).clone()
    return (new, *value[1:]) if isinstance(value, tuple) else new


def _each(edits: Sequence[Edit], rows: torch.Tensor) -> torch.Tensor:
    for edit in edits:
        rows = by_hand(edit, rows.reshape(-1, *edit.point.shape)).reshape(rows.shape)
    return rows


def hooked(model: Model, tokens: Sequence[int], edits: Sequence[Edit]) -> tuple[torch.Tensor, Values]:
    """[tokens, vocabulary] logits, and each edited point's value, of one forward with plain hooks."""
    changes = {mine[0].point: functools.partial(_each, mine) for mine in _in_order(edits).values()}
    values = by_hooks(model.hf, tokens, list({edit.point: None for edit in edits}), changes)
    return values.pop("logits").roll(-1, 0), values


@torch.inference_mode()
def traced(model: Model, tokens: Sequence[int], edits: Sequence[Edit]) -> tuple[torch.Tensor, Values]:
    """The same by nnsight's `trace`."""
    nnsight = import_nnsight()
    places = [(place.side, mine, envoy_of(model, place)) for place, mine in _in_order(edits).items()]
    values: Values = {}
    with model.nnsight.trace(torch.tensor([list(tokens)], device=model.device)):
        for side, mine, module in places:
            if side == "input":
                module.input = _changed(module.input, mine, values)
            else:
                module.output = _changed(module.output, mine, values)
        seen = nnsight.save(values)
        logits = nnsight.save(model.nnsight.output.logits)
    return logits[0].cpu(), {name: value.cpu() for name, value in seen.items()}
