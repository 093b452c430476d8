"""From the interventions that a request names to the edits that the engine makes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from deployments.activations.interventions import Add, Clamp, Intervention, Positions, ProjectOut, Replace, Scale
from deployments.activations.points import Point, Points
from deployments.activations.spec import Features, Last
from deployments.activations.tensors import pick, split
from deployments.engine.edits import Edit, Tokens
from deployments.engine.model import Model
from deployments.errors import RequestError


class Editor:
    """One model's way from interventions to edits."""

    def __init__(self, model: Model, store: Any) -> None:
        """Take a model and the activation store's handle."""
        self._model = model
        self._store = store

    async def tensors(self, interventions: Sequence[Intervention]) -> dict[str, torch.Tensor]:
        """The tensors that interventions name, by what they call them.

        Raises:
            RequestError: There is none of that name; names the field.
            StoreError: The disk refuses.
        """
        found: dict[str, torch.Tensor] = {}
        for i, spec in enumerate(interventions):
            reference, field = getattr(spec, "vector", None), f"interventions[{i}].vector"
            if not isinstance(reference, str) or reference in found:
                continue
            data = await self._store.tensor_file.remote(split(reference)[0])
            if data is None:
                raise RequestError(f"there is no tensor {reference!r}", field, "tensor_not_found")
            try:
                found[reference] = pick(reference, data)
            except RequestError as refused:
                raise RequestError(refused.message, field, refused.code) from refused
        return found

    def editing(self, interventions: Sequence[Intervention], tensors: Mapping[str, torch.Tensor]) -> Editing:
        """Interventions, with the tensors they name, looked up in the model; takes time.

        Raises:
            RequestError: As `Editing` does.
        """
        return Editing(self._model.points, interventions, tensors, self._model.device)


class _Prepared(NamedTuple):
    spec: Intervention
    field: str
    edits: list[Edit]  # one for each point that it means, of all tokens


class Editing:
    """One request's interventions, looked up in one model; for each of its prompts they become edits."""

    def __init__(
        self,
        points: Points,
        interventions: Sequence[Intervention],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """Look up all points and lay out all vectors.

        Args:
            points: The model's.
            interventions: As they were sent.
            tensors: Those that they name, by what they call them.
            device: The model's.

        Raises:
            RequestError: A point, head or feature that is not there, or a vector of the wrong length; names the
                field.
        """
        self._prepared = []
        for i, spec in enumerate(interventions):
            field = f"interventions[{i}]"
            vector = _vector(spec, tensors, field)
            named = points.named(spec.point, f"{field}.point")
            edits = [_edit(spec, vector, point, field, device) for point in named]
            self._prepared.append(_Prepared(spec, field, edits))

    def of(self, prompt: int, most: int) -> tuple[Edit, ...]:
        """The edits of a sequence.

        Args:
            prompt: Tokens of its prompt.
            most: Tokens of its prompt and the most that are generated.

        Raises:
            RequestError: Tokens that it cannot have; names the field.
        """
        found = []
        for spec, field, edits in self._prepared:
            tokens = _tokens(spec, prompt, most, f"{field}.tokens")
            found += [replace(edit, tokens=tokens) for edit in edits]
        return tuple(found)


def _vector(spec: Intervention, tensors: Mapping[str, torch.Tensor], field: str) -> torch.Tensor:
    """What an operation has for a vector, in one row; of none where it has none."""
    if not isinstance(spec, (Add, ProjectOut, Replace)):
        return torch.empty(0)
    sent = tensors[spec.vector] if isinstance(spec.vector, str) else torch.tensor(spec.vector)
    vector = (spec.scale if isinstance(spec, Add) else 1.0) * sent.flatten().float()
    if not vector.isfinite().all():
        raise RequestError("scale makes the vector infinite", f"{field}.scale")
    if isinstance(spec, ProjectOut) and not vector.any():
        raise RequestError("a vector of zeros has no direction to project out", f"{field}.vector")
    return vector


def _edit(spec: Intervention, vector: torch.Tensor, point: Point, field: str, device: torch.device) -> Edit:
    if not point.place.dtype.is_floating_point:
        raise RequestError(f"{point.name} holds no activations but {point.place.dtype} numbers", f"{field}.point")
    heads, features = _heads(spec, point, field), _features(spec.features, point, field)
    edit = functools.partial(Edit, point, features=features, heads=heads)
    if isinstance(spec, (Add, ProjectOut, Replace)):
        return edit(spec.op, vector=_fitted(vector, heads, features, point, field).to(device))
    if isinstance(spec, Clamp):
        low, high = -math.inf if spec.min is None else spec.min, math.inf if spec.max is None else spec.max
        return edit("clamp", low=low, high=high)
    return edit("scale", low=spec.factor if isinstance(spec, Scale) else 0.0)


def _heads(spec: Intervention, point: Point, field: str) -> tuple[int, ...] | None:
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
    """The vector as rows of the point have it: for all heads alike, or for each by itself."""
    width = len(features) if features else point.shape[-1]
    if len(vector) == width:
        return vector
    count = len(heads) if heads else math.prod(point.shape[:-1])
    if count > 1 and len(vector) == count * width:
        return vector.view(count, width)
    each = f", or {count * width} for {count} heads" if count > 1 else ""
    raise RequestError(f"{len(vector)} numbers: {width} are changed at {point.name}{each}", f"{field}.vector")


def _tokens(spec: Intervention, prompt: int, most: int, field: str) -> Tokens:
    tokens = spec.tokens
    if isinstance(tokens, Positions):
        few = tuple(sorted(set(tokens.positions)))
        if few[-1] >= most:
            raise RequestError(f"there are tokens 0 to {most - 1}, prompt and answer together", field)
        return Tokens(few=few)
    if isinstance(tokens, Last):
        if tokens.last > prompt:
            raise RequestError(f"the prompt has {prompt} tokens", field)
        return Tokens(prompt - tokens.last, prompt)
    return {
        "all": Tokens(),
        "prompt": Tokens(0, prompt),
        "generated": Tokens(prompt),
        "last": Tokens(prompt - 1, prompt),
    }[tokens]
