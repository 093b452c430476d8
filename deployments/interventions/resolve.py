"""Resolves a request's interventions to the engine's edits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from deployments.engine.edits import Edit, FeatureChange, Kind, Norms, Report
from deployments.errors import RequestError
from deployments.interventions.stored_tensors import FetchedTensors
from deployments.places.hook_site import Point
from deployments.places.points import Points
from deployments.points.capture import Features
from deployments.points.interventions import (
    VECTORS,
    Ablate,
    Add,
    Change,
    ChangeFeature,
    Clamp,
    ClampProjection,
    Intervention,
    ProjectOut,
    Replace,
    Rotate,
    Scale,
)
from deployments.points.placement import Layout, placed
from deployments.points.token_choices import Positions, TokenChoice, Tokens, farthest, resolve_ahead
from deployments.readouts.resolver import ReadoutResolver

ZERO = "a vector of zeros has no direction"
PARALLEL = 1e-6  # sine of an angle below which two directions count as parallel; float32 gives them 7 digits


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
            if isinstance(spec, Replace) and spec.rows:
                edits = _patches(spec, fetched.rows[field], named, field, device)
            else:
                vectors = _vectors(spec, fetched.tensors, field)
                edits = [_edit(spec, vectors, point, field, device) for point in named]
            self._prepared[field] = _Resolved(spec, field, edits)

    def of(self, fields: Iterable[str], prompt: int, most: int, layout: Layout) -> tuple[Edit, ...]:
        """The edits of a sequence.

        Args:
            fields: The fields of its interventions, in order.
            prompt: The number of prompt tokens.
            most: The number of prompt tokens and the most new ones.
            layout: See `placement.placed`.

        Raises:
            RequestError: It cannot have such tokens, or their number differs from that of the rows; names the field.
        """
        resolved = []
        for spec, field, edits in map(self._prepared.__getitem__, fields):
            choice = placed(spec.tokens, layout, f"{field}.tokens")
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


def _vectors(spec: Change, tensors: Mapping[str, torch.Tensor], field: str) -> dict[str, torch.Tensor]:
    """The vectors of an operation by their fields, each in one row."""
    sent = {name: value for name in VECTORS if (value := getattr(spec, name, None)) is not None}
    rows = {name: tensors[value] if isinstance(value, str) else torch.tensor(value) for name, value in sent.items()}
    vectors = {name: row.flatten().float() for name, row in rows.items()}
    if isinstance(spec, Add):
        vector = vectors["vector"]
        if spec.unit == "residual_norm":
            vector = _unit(vector, f"{field}.vector").float()
        vectors["vector"] = spec.scale * vector
    for name, vector in vectors.items():
        if not vector.isfinite().all():
            at = "scale" if isinstance(spec, Add) else name
            raise RequestError("the vector's numbers exceed float32: choose smaller ones", f"{field}.{at}")
    return vectors


def _edit(spec: Change, vectors: Mapping[str, torch.Tensor], point: Point, field: str, device: torch.device) -> Edit:
    heads, features = _part(spec, point, field)
    fitted = {name: _fitted(row, heads, features, point, f"{field}.{name}") for name, row in vectors.items()}
    kind: Kind
    pair = tuple[torch.Tensor, ...]()
    vector, low, high = fitted.get("vector"), 0.0, 0.0
    match spec:
        case Add():
            kind = "add_norm" if spec.unit == "residual_norm" else "add"
        case Replace():
            kind, low = spec.kind, spec.alpha
        case Ablate(vector=None):
            kind, vector = "replace", fitted["mean"]
        case Ablate():
            kind, pair = "ablate", (_unit(fitted["vector"], f"{field}.vector"), fitted["mean"])
        case ProjectOut():
            kind, vector = "project_out", _unit(fitted["vector"], f"{field}.vector")
        case Rotate():
            first, second = (_unit(fitted[name], f"{field}.{name}") for name in ("vector", "toward"))
            rest = second - (second * first).sum(-1, keepdim=True) * first
            if (rest.norm(dim=-1) < PARALLEL).any():
                message = "it is parallel to vector, so that they span no plane: choose another direction"
                raise RequestError(message, f"{field}.toward")
            angle = math.radians(spec.angle)
            kind, pair = "rotate", (first, _unit(rest, f"{field}.toward"))
            low, high = math.cos(angle) - 1, math.sin(angle)
        case Clamp():
            kind, low, high = "clamp", *spec.limits
        case ClampProjection():
            kind, low, high = "clamp_projection", *spec.limits
            vector = _unit(fitted["vector"], f"{field}.vector")
        case _:
            kind, low = "scale", spec.factor if isinstance(spec, Scale) else 0.0
    if pair:  # one of them may be the same for all heads
        vector = torch.cat(torch.broadcast_tensors(*pair), dim=-1)  # type: ignore[no-untyped-call]
    vector = None if vector is None else vector.float().to(device)
    return Edit(point, kind, features=features, heads=heads, vector=vector, low=low, high=high)


def _unit(vector: torch.Tensor, field: str) -> torch.Tensor:
    """[..., features] in float64, divided by the norm of its last axis.

    Raises:
        RequestError: It is zero for a head; names the field.
    """
    norm: torch.Tensor = vector.double().norm(dim=-1, keepdim=True)
    if not norm.all():
        raise RequestError(ZERO, field)
    return vector.double() / norm


def _patches(
    spec: Replace, fetched: Sequence[torch.Tensor], points: Sequence[Point], field: str, device: torch.device
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


def _patch(spec: Replace, rows: torch.Tensor, point: Point, field: str, device: torch.device) -> Edit:
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
    return Edit(point, spec.kind, features=features, heads=heads, vector=part.to(device), low=spec.alpha)


def _paired(
    rows: torch.Tensor | None, choice: TokenChoice | Tokens, tokens: Tokens, most: int, field: str
) -> torch.Tensor:
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
    if len(point.shape) < 2:
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
    raise RequestError(f"{len(vector)} numbers, but {point.name} needs {width}{each}", field)
