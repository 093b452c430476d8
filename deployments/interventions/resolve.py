"""Resolves a request's interventions to the engine's edits."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from deployments.engine.edits import Edit, FeatureChange, Kind, Norms, Report, Tokens
from deployments.errors import RequestError
from deployments.interventions.stored_tensors import FetchedTensors
from deployments.places.hook_site import Point
from deployments.places.points import Points
from deployments.points.capture import Features
from deployments.points.interventions import Add, Change, ChangeFeature, Clamp, Intervention, ProjectOut, Replace, Scale
from deployments.points.token_choices import Ends, Positions, TokenChoice, farthest, placed, resolve_ahead
from deployments.readouts.resolver import ReadoutResolver


class _Resolved(NamedTuple):
    spec: Intervention
    field: str
    edits: list[Edit]  # one for each of its points, for all tokens


class EditResolver:
    """One request's interventions, resolved for one model; each of its sequences gets some of them as edits."""

    def __init__(
        self,
        points: Points,
        device: torch.device,
        changes: Mapping[str, Intervention],
        fetched: FetchedTensors,
        readouts: ReadoutResolver | None = None,
        report: bool = False,
    ) -> None:
        """Look up all points and prepare all vectors.

        Args:
            points: The model's points.
            device: The model's device.
            changes: The request's interventions by their fields.
            fetched: The tensors that they refer to.
            readouts: The readouts that the request uses.
            report: Whether each edit reports its effects.

        Raises:
            RequestError: A point, head or feature does not exist, or a vector or rows have the wrong shape; names the
                field.
        """
        self._prepared = dict[str, _Resolved]()
        self._readouts, self._report = readouts or ReadoutResolver({}, {}), report
        for field, spec in changes.items():
            if isinstance(spec, ChangeFeature):
                self._prepared[field] = _Resolved(spec, field, [self._feature(spec, field)])
                continue
            named = points.named(spec.point, f"{field}.point")
            if field in fetched.rows:
                edits = _patches(spec, fetched.rows[field], named, field, device)
            else:
                vector = _vector(spec, fetched.tensors, field)
                edits = [_edit(spec, vector, point, field, device) for point in named]
            self._prepared[field] = _Resolved(spec, field, edits)

    def of(self, fields: Iterable[str], prompt: int, most: int, ends: Ends) -> tuple[Edit, ...]:
        """The edits of a sequence.

        Args:
            fields: The fields of its interventions, in order.
            prompt: The number of prompt tokens.
            most: The number of prompt tokens and the most new ones.
            ends: See `token_choices.placed`.

        Raises:
            RequestError: It cannot have such tokens, or their number differs from that of the rows; names the field.
        """
        resolved = []
        for spec, field, edits in map(self._prepared.__getitem__, fields):
            choice = placed(spec.tokens, ends, f"{field}.tokens")
            tokens = resolve_ahead(choice, prompt, most, f"{field}.tokens")
            if farthest(choice) >= most:
                raise RequestError(f"prompt and answer have positions 0 to {most - 1}", f"{field}.tokens")
            for edit in edits:
                vector = _paired(edit.vector, choice, tokens, most, field) if edit.per_token else edit.vector
                norms = Norms() if edit.kind == "add_norm" else None
                made = replace(edit, tokens=tokens, vector=vector, norms=norms, field=field)
                if spec.when is not None:
                    gate = self._readouts.gate(spec.when, edit.point, tokens, prompt, f"{field}.when")
                    made = replace(made, gate=gate)
                resolved.append(replace(made, report=Report()) if self._report else made)
        return tuple(resolved)

    def _feature(self, spec: ChangeFeature, field: str) -> Edit:
        source, point = self._readouts.autoencoder(spec.sae, f"{field}.sae")
        if spec.feature >= source.readout.count:
            message = f"{spec.sae} has features 0 to {source.readout.count - 1}"
            raise RequestError(message, f"{field}.feature")
        change = FeatureChange(source.readout, spec.feature, spec.op)
        return Edit(point, "feature", change=change, low=spec.value or 0.0)


def _vector(spec: Change, tensors: Mapping[str, torch.Tensor], field: str) -> torch.Tensor:
    """The vector of an operation, in one row; empty if it has none."""
    if not isinstance(spec, (Add, ProjectOut, Replace)) or spec.vector is None:
        return torch.empty(0)
    sent = tensors[spec.vector] if isinstance(spec.vector, str) else torch.tensor(spec.vector)
    vector = (spec.scale if isinstance(spec, Add) else 1.0) * sent.flatten().float()
    if not vector.isfinite().all():
        raise RequestError("scale makes the vector infinite", f"{field}.scale")
    has_direction = isinstance(spec, ProjectOut) or _is_relative(spec)
    if has_direction and not sent.any():
        raise RequestError("a vector of zeros has no direction", f"{field}.vector")
    return vector / sent.flatten().float().norm() if _is_relative(spec) else vector


def _is_relative(spec: Change) -> bool:
    return isinstance(spec, Add) and spec.unit == "residual_norm"


def _edit(spec: Change, vector: torch.Tensor, point: Point, field: str, device: torch.device) -> Edit:
    heads, features = _part(spec, point, field)
    edit = functools.partial(Edit, point, features=features, heads=heads)
    if isinstance(spec, (Add, ProjectOut, Replace)):
        kind: Kind = "add_norm" if _is_relative(spec) else spec.op
        return edit(kind, vector=_fitted(vector, heads, features, point, field).to(device))
    if isinstance(spec, Clamp):
        low, high = -math.inf if spec.min is None else spec.min, math.inf if spec.max is None else spec.max
        return edit("clamp", low=low, high=high)
    return edit("scale", low=spec.factor if isinstance(spec, Scale) else 0.0)


def _patches(
    spec: Change, fetched: Sequence[torch.Tensor], points: Sequence[Point], field: str, device: torch.device
) -> list[Edit]:
    """The edits that replace points' values by a stored run's rows [tokens, ...], one for each or the same for all."""
    if len(fetched) == len(points):
        return [_patch(spec, rows, point, field, device) for rows, point in zip(fetched, points, strict=True)]
    first = _patch(spec, fetched[0], points[0], field, device)
    alike = [point for point in points if point.shape == points[0].shape]
    if len(alike) < len(points):
        raise RequestError(
            "its points have rows of different shapes: use one operation for each, with a point of the run",
            f"{field}.from",
        )
    return [replace(first, point=point) for point in points]  # they share the rows


def _patch(spec: Change, rows: torch.Tensor, point: Point, field: str, device: torch.device) -> Edit:
    """The edit that replaces a point's values by a stored run's rows [tokens, ...]."""
    heads, features = _part(spec, point, field)
    if math.prod(rows.shape[1:]) == math.prod(point.shape):
        rows = rows.view(len(rows), *point.shape)  # by heads, or not
    if rows.shape[1:] != point.shape:
        has, needs = list(rows.shape[1:]), list(point.shape)
        message = f"the run's rows have the shape {has}, those of {point.name} have {needs}: record whole rows"
        raise RequestError(message, f"{field}.from.point")
    if not rows.dtype.is_floating_point or not rows.isfinite().all():
        raise RequestError("the run's rows have values that are not finite", f"{field}.from")
    part = rows if heads is None else rows[:, list(heads)]
    part = part if features is None else part[..., list(features)]
    return Edit(point, "replace", features=features, heads=heads, vector=part.to(device))


def _paired(rows: torch.Tensor | None, choice: TokenChoice, tokens: Tokens, most: int, field: str) -> torch.Tensor:
    """The rows [tokens, ...] for the tokens, in ascending order of these."""
    assert rows is not None
    listed = choice.positions if isinstance(choice, Positions) else tokens.within(0, most)
    if len(set(listed)) < len(listed):
        raise RequestError("a token is listed twice: list each token once", f"{field}.tokens")
    if len(listed) != len(rows):
        counted = " (all of prompt and max_tokens)" if tokens.stop is None and not tokens.few else ""
        message = f"{len(rows)} rows of the stored run cannot replace those of {len(listed)} tokens{counted}"
        raise RequestError(message, f"{field}.from.tokens")
    if sorted(listed) == list(listed):
        return rows
    return rows[sorted(range(len(listed)), key=listed.__getitem__)]


def _part(spec: Change, point: Point, field: str) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The heads and features of a point that change; None for all."""
    if not point.place.dtype.is_floating_point:
        message = f"{point.name} has values of dtype {point.place.dtype}, which are not activations"
        raise RequestError(message, f"{field}.point")
    return _heads(spec, point, field), _features(spec.features, point, field)


def _heads(spec: Change, point: Point, field: str) -> tuple[int, ...] | None:
    if spec.heads is None:
        return None
    if not point.name.endswith(".attention.heads"):
        raise RequestError(f"{point.name} has no heads: they are at layers.{{i}}.attention.heads", f"{field}.heads")
    if max(spec.heads) >= point.shape[0]:
        raise RequestError(f"{point.name} has heads 0 to {point.shape[0] - 1}", f"{field}.heads")
    return tuple(dict.fromkeys(spec.heads))


def _features(features: Features | None, point: Point, field: str) -> tuple[int, ...] | None:
    if features is None:
        return None
    index = tuple(dict.fromkeys(features.index)) if features.index else tuple(range(features.first or 0))
    if max(index) >= point.shape[-1]:
        raise RequestError(f"{point.name} has features 0 to {point.shape[-1] - 1}", f"{field}.features")
    return index


def _fitted(
    vector: torch.Tensor,
    heads: tuple[int, ...] | None,
    features: tuple[int, ...] | None,
    point: Point,
    field: str,
) -> torch.Tensor:
    """The vector in the shape of the point's rows: the same for all heads, or one for each."""
    width = len(features) if features else point.shape[-1]
    if len(vector) == width:
        return vector
    count = len(heads) if heads else math.prod(point.shape[:-1])
    if count > 1 and len(vector) == count * width:
        return vector.view(count, width)
    each = f", or {count * width} for {count} heads" if count > 1 else ""
    raise RequestError(f"{len(vector)} numbers, but {point.name} needs {width}{each}", f"{field}.vector")
