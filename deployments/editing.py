"""From the interventions that a request names to the edits that the engine makes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load

from deployments.activations.interventions import (
    Add,
    Clamp,
    Intervention,
    Positions,
    ProjectOut,
    Replace,
    Scale,
    StoredRows,
)
from deployments.activations.points import Point, Points
from deployments.activations.spec import Features, Last
from deployments.activations.tensors import pick, split
from deployments.engine.edits import Edit, Tokens
from deployments.engine.model import Model
from deployments.errors import RequestError


class Brought(NamedTuple):
    """What interventions name and the activation store holds.

    Attributes:
        tensors: Those of clients' files, by what the request calls them.
        rows: By an intervention's place in the list, for each point that it means, or for all of them: [tokens, ...]
            of a stored run.
    """

    tensors: Mapping[str, torch.Tensor]
    rows: Mapping[int, Sequence[torch.Tensor]]


class Editor:
    """One model's way from interventions to edits."""

    def __init__(self, model: Model, store: Any, most: int) -> None:
        """Begin with nothing lent.

        Args:
            model: The model.
            store: The activation store's handle.
            most: The most bytes that all jobs together hold of what the store gave.
        """
        self._model = model
        self._store = store
        self._most = most
        self._lent: dict[str, int] = {}  # job -> bytes
        self._bringing = asyncio.Lock()  # so that no more comes at a time than there is room for

    @contextlib.contextmanager
    def lending(self, job: str) -> Iterator[None]:
        """Account for what a job is brought, until it is over."""
        self._lent[job] = 0
        try:
            yield
        finally:
            self._lent.pop(job, None)

    async def bring(self, job: str, interventions: Sequence[Intervention]) -> Brought:
        """What interventions name and the activation store holds.

        Args:
            job: For which `lending` accounts.
            interventions: As they were sent.

        Raises:
            RequestError: There is none of that name, or no room for it; names the field.
            StoreError: The disk refuses.
        """
        tensors: dict[str, torch.Tensor] = {}
        rows: dict[int, list[torch.Tensor]] = {}
        for i, spec in enumerate(interventions):
            field, reference = f"interventions[{i}]", getattr(spec, "vector", None)
            if isinstance(spec, Replace) and spec.rows is not None:
                async with self._bringing:
                    rows[i] = await self._rows(spec, spec.rows, field)
                    self._take(job, rows[i], f"{field}.from")
            elif isinstance(reference, str) and reference not in tensors:
                async with self._bringing:
                    tensors[reference] = await self._tensor(reference, f"{field}.vector")
                    self._take(job, [tensors[reference]], f"{field}.vector")
        return Brought(tensors, rows)

    async def _tensor(self, reference: str, field: str) -> torch.Tensor:
        data = await self._store.tensor_file.remote(split(reference)[0])
        if data is None:
            raise RequestError(f"there is no tensor {reference!r}", field, "tensor_not_found")
        try:
            return pick(reference, data)
        except RequestError as refused:
            raise RequestError(refused.message, field, refused.code) from refused

    async def _rows(self, spec: Replace, source: StoredRows, field: str) -> list[torch.Tensor]:
        """For each point that an operation means, or for all of them, [tokens, ...] of a stored run."""
        points = self._model.points.named(spec.point, f"{field}.point")
        names: list[tuple[str, ...]] = [(point.name, point.module) for point in points]
        if source.point is not None:
            names = self._names(source.point)
            if len(names) not in (1, len(points)):
                message = f"{source.point} means {len(names)} points, {spec.point} {len(points)}"
                raise RequestError(message, f"{field}.from.point")
        try:
            data = await self._store.rows.remote(source.run_id, names, source.tokens, self._most)
        except RequestError as refused:
            raise RequestError(refused.message, f"{field}.{refused.field}", refused.code) from refused
        if data is None:
            message = f"there is no stored run {source.run_id!r}: it is not finished, came inline, or was deleted"
            raise RequestError(message, f"{field}.from.run_id", "run_not_found")
        found = load(data)
        return [found[str(i)] for i in range(len(names))]

    def _names(self, pattern: str) -> list[tuple[str, ...]]:
        """The names by which a run may have recorded what a request calls by one."""
        try:
            points = self._model.points.named(pattern, "from.point")
        except RequestError:
            return [(pattern,)]  # of another model, or a savepoint that this one had
        own = (pattern,) if len(points) == 1 else ()
        return [(*own, point.name, point.module) for point in points]

    def _take(self, job: str, brought: Sequence[torch.Tensor], field: str) -> None:
        """Account for what a job was brought, where there is room for it."""
        own = self._lent.get(job, 0) + sum(tensor.nbytes for tensor in brought)
        if own > self._most:
            message = f"{own} bytes of tensors and stored rows, and there is room for {self._most}"
            raise RequestError(message, field, "rows_too_large")
        if own + sum(size for other, size in self._lent.items() if other != job) > self._most:
            message = "other requests' tensors and stored rows leave no room for these now"
            raise RequestError(message, field, "server_busy", 429)
        self._lent[job] = own

    def editing(self, interventions: Sequence[Intervention], brought: Brought) -> Editing:
        """Interventions, with what they name, looked up in the model; takes time.

        Raises:
            RequestError: As `Editing` does.
        """
        return Editing(self._model.points, interventions, brought, self._model.device)


class _Prepared(NamedTuple):
    spec: Intervention
    field: str
    edits: list[Edit]  # one for each point that it means, of all tokens


class Editing:
    """One request's interventions, looked up in one model; for each of its prompts they become edits."""

    def __init__(
        self, points: Points, interventions: Sequence[Intervention], brought: Brought, device: torch.device
    ) -> None:
        """Look up all points and lay out all vectors.

        Args:
            points: The model's.
            interventions: As they were sent.
            brought: What they name.
            device: The model's.

        Raises:
            RequestError: A point, head or feature that is not there, or a vector or rows of the wrong shape; names
                the field.
        """
        self._prepared = []
        for i, spec in enumerate(interventions):
            field = f"interventions[{i}]"
            named = points.named(spec.point, f"{field}.point")
            if i in brought.rows:
                rows = brought.rows[i] if len(brought.rows[i]) == len(named) else [brought.rows[i][0]] * len(named)
                edits = [_patch(spec, *one, field, device) for one in zip(rows, named, strict=True)]
            else:
                vector = _vector(spec, brought.tensors, field)
                edits = [_edit(spec, vector, point, field, device) for point in named]
            self._prepared.append(_Prepared(spec, field, edits))

    def of(self, prompt: int, most: int) -> tuple[Edit, ...]:
        """The edits of a sequence.

        Args:
            prompt: Tokens of its prompt.
            most: Tokens of its prompt and the most that are generated.

        Raises:
            RequestError: Tokens that it cannot have, or other than there are rows for; names the field.
        """
        found = []
        for spec, field, edits in self._prepared:
            tokens = _tokens(spec, prompt, most, f"{field}.tokens")
            for edit in edits:
                vector = _paired(edit.vector, spec, tokens, most, field) if edit.per_token else edit.vector
                found.append(replace(edit, tokens=tokens, vector=vector))
        return tuple(found)


def _vector(spec: Intervention, tensors: Mapping[str, torch.Tensor], field: str) -> torch.Tensor:
    """What an operation has for a vector, in one row; of none where it has none."""
    if not isinstance(spec, (Add, ProjectOut, Replace)) or spec.vector is None:
        return torch.empty(0)
    sent = tensors[spec.vector] if isinstance(spec.vector, str) else torch.tensor(spec.vector)
    vector = (spec.scale if isinstance(spec, Add) else 1.0) * sent.flatten().float()
    if not vector.isfinite().all():
        raise RequestError("scale makes the vector infinite", f"{field}.scale")
    if isinstance(spec, ProjectOut) and not vector.any():
        raise RequestError("a vector of zeros has no direction to project out", f"{field}.vector")
    return vector


def _edit(spec: Intervention, vector: torch.Tensor, point: Point, field: str, device: torch.device) -> Edit:
    heads, features = _part(spec, point, field)
    edit = functools.partial(Edit, point, features=features, heads=heads)
    if isinstance(spec, (Add, ProjectOut, Replace)):
        return edit(spec.op, vector=_fitted(vector, heads, features, point, field).to(device))
    if isinstance(spec, Clamp):
        low, high = -math.inf if spec.min is None else spec.min, math.inf if spec.max is None else spec.max
        return edit("clamp", low=low, high=high)
    return edit("scale", low=spec.factor if isinstance(spec, Scale) else 0.0)


def _patch(spec: Intervention, rows: torch.Tensor, point: Point, field: str, device: torch.device) -> Edit:
    """The edit that puts a stored run's rows [tokens, ...] in the place of a point's."""
    heads, features = _part(spec, point, field)
    if rows.shape[1:] != point.shape:
        has, needs = list(rows.shape[1:]), list(point.shape)
        message = f"the run's rows have the shape {has}, those of {point.name} {needs}: record them whole"
        raise RequestError(message, f"{field}.from.point")
    if not rows.dtype.is_floating_point or not rows.isfinite().all():
        raise RequestError("the run's rows hold what is no finite activation", f"{field}.from")
    by_head = rows.view(len(rows), -1, rows.shape[-1])
    by_head = by_head if heads is None else by_head[:, list(heads)]
    part = by_head if features is None else by_head[..., list(features)]
    vector = part if len(point.shape) > 1 else part.squeeze(1)
    return Edit(point, "replace", features=features, heads=heads, vector=vector.to(device))


def _paired(rows: torch.Tensor | None, spec: Intervention, tokens: Tokens, most: int, field: str) -> torch.Tensor:
    """The rows [tokens, ...] that go to the tokens, these in ascending order."""
    assert rows is not None
    listed = spec.tokens.positions if isinstance(spec.tokens, Positions) else tokens.within(0, most)
    if len(set(listed)) < len(listed):
        raise RequestError("a token is listed twice, and each gets one row", f"{field}.tokens")
    if len(listed) != len(rows):
        counted = ", as many as prompt and max_tokens make at most" if tokens.stop is None and not tokens.few else ""
        message = f"{len(rows)} rows of the stored run for {len(listed)} tokens{counted}: both must be as many"
        raise RequestError(message, f"{field}.from.tokens")
    if tokens.few is None or list(tokens.few) == list(listed):
        return rows
    return rows[sorted(range(len(listed)), key=listed.__getitem__)]


def _part(spec: Intervention, point: Point, field: str) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The heads and features of a point that are changed; None for all."""
    if not point.place.dtype.is_floating_point:
        raise RequestError(f"{point.name} holds no activations but {point.place.dtype} numbers", f"{field}.point")
    return _heads(spec, point, field), _features(spec.features, point, field)


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
