"""What interventions name and the activation store holds: clients' tensors, and rows of stored runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load

from deployments.activations.accounts import Account
from deployments.activations.interventions import Replace, StoredRows
from deployments.activations.points import Points
from deployments.activations.tensors import pick, split
from deployments.errors import RequestError
from deployments.messages import Job


class Brought(NamedTuple):
    """What interventions name and the activation store holds.

    Attributes:
        tensors: Those of clients' files, by what the request calls them.
        rows: By an intervention's place in the list, for each point that it means, or for all of them: [tokens, ...]
            of a stored run.
    """

    tensors: Mapping[str, torch.Tensor]
    rows: Mapping[int, Sequence[torch.Tensor]]


class Holdings:
    """One replica's way to them, within a number of bytes for all its jobs together."""

    def __init__(self, points: Points, store: Any, most: int) -> None:
        """Begin with nothing lent.

        Args:
            points: The model's.
            store: The activation store's handle.
            most: The most bytes that all jobs together hold of what the store gave.
        """
        self._points = points
        self._store = store
        self._most = most
        self._lent: dict[str, int] = {}  # job -> bytes
        self._bringing = asyncio.Lock()  # rows, so that no more come at a time than there is room for

    @contextlib.contextmanager
    def lending(self, job: str) -> Iterator[None]:
        """Account for what a job is brought, until it is over."""
        self._lent[job] = 0
        try:
            yield
        finally:
            self._lent.pop(job, None)

    async def bring(self, job: Job) -> Brought:
        """What a job's interventions name and the activation store holds; `lending` accounts for it.

        Raises:
            RequestError: There is none of that name that they may read, or no room for it; names the field.
            StoreError: The disk refuses.
        """
        tensors: dict[str, torch.Tensor] = {}
        rows: dict[int, list[torch.Tensor]] = {}
        readable = set[tuple[str, Account]]()
        for i, spec in enumerate(job.interventions):
            reader = job.reader(i)
            field, reference = f"interventions[{i}]", getattr(spec, "vector", None)
            if isinstance(spec, Replace) and spec.rows is not None:
                async with self._bringing:
                    rows[i] = await self._rows(spec, spec.rows, field, reader)
                    self._take(job.id, rows[i], f"{field}.from")
            elif isinstance(reference, str) and (reference, reader) not in readable:
                tensors[reference] = await self._tensor(reference, f"{field}.vector", reader)
                readable.add((reference, reader))
                self._take(job.id, [tensors[reference]], f"{field}.vector")
        return Brought(tensors, rows)

    async def _tensor(self, reference: str, field: str, reader: Account) -> torch.Tensor:
        data = await self._store.tensor_file.remote(split(reference)[0], reader)
        if data is None:
            raise RequestError(f"there is no tensor {reference!r}", field, "tensor_not_found")
        try:
            return pick(reference, data)
        except RequestError as refused:
            raise RequestError(refused.message, field, refused.code) from refused

    async def _rows(self, spec: Replace, source: StoredRows, field: str, reader: Account) -> list[torch.Tensor]:
        """For each point that an operation means, or for all of them, [tokens, ...] of a stored run."""
        points = self._points.named(spec.point, f"{field}.point")
        names: list[tuple[str, ...]] = [(point.name, point.module) for point in points]
        if source.point is not None:
            names = self._names(source.point)
            if len(names) not in (1, len(points)):
                message = f"{source.point} means {len(names)} points, {spec.point} {len(points)}"
                raise RequestError(message, f"{field}.from.point")
        try:
            data = await self._store.rows.remote(source.run_id, names, source.tokens, self._most, reader)
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
            points = self._points.named(pattern, "from.point")
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
