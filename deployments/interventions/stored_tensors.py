"""Fetches the tensors and rows of stored runs that interventions refer to from the activation store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load

from deployments.activations.actors.reader import survived
from deployments.activations.facts import Account, StoreError
from deployments.activations.uploads.tensors import pick, split
from deployments.errors import RequestError
from deployments.job import Job
from deployments.places.points import Points
from deployments.points.interventions import Replace, StoredRows

FLOAT_BYTES = 4  # of each number of a vector that a request has in it


class FetchedTensors(NamedTuple):
    """What interventions name and the activation store holds.

    Attributes:
        tensors: Those of clients' files, by what the request calls them.
        rows: By an intervention's field, for each point that it means, or for all of them: [tokens, ...] of a stored
            run.
    """

    tensors: Mapping[str, torch.Tensor]
    rows: Mapping[str, Sequence[torch.Tensor]]


class _WantedRows(NamedTuple):
    """Rows of a stored run that an intervention asks for."""

    field: str
    source: StoredRows
    reader: Account
    names: Sequence[tuple[str, ...]]  # of each point, or of one for all


class StoredTensors:
    """One replica's way to them, within a number of bytes for all its jobs together."""

    def __init__(self, points: Points, store: Any, reader: Any, most: int) -> None:
        """Initialize with no tensors held.

        Args:
            points: The model's.
            store: The activation store's handle.
            reader: Its reader's.
            most: The most bytes that all jobs together hold of what the store gave and of vectors of their own.
        """
        self._points = points
        self._store = store
        self._reader = reader
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

    async def fetch(self, job: Job) -> FetchedTensors:
        """What a job's interventions name and the activation store holds; `lending` accounts for it.

        Raises:
            RequestError: There is none of that name that they may read, its file is gone or damaged, or no room for
                it; names the field.
            StoreError: The disk refuses.
        """
        tensors: dict[str, torch.Tensor] = {}
        rows: dict[str, list[torch.Tensor]] = {}
        readable = set[tuple[str, Account]]()
        asked: dict[Any, list[_WantedRows]] = {}
        for field, spec in job.all_changes.items():
            reader, reference = job.reader(field), getattr(spec, "vector", None)
            if isinstance(spec, Replace) and spec.rows is not None:
                one = _WantedRows(field, spec.rows, reader, self._names_of(spec, spec.rows, field))
                asked.setdefault((spec.rows.run_id, repr(spec.rows.tokens), reader), []).append(one)
            elif isinstance(reference, str) and (reference, reader) not in readable:
                tensors[reference] = await self._tensor(reference, f"{field}.vector", reader)
                readable.add((reference, reader))
                self._take(job.id, tensors[reference].nbytes, f"{field}.vector")
            elif isinstance(reference, Sequence) and not isinstance(reference, str):
                self._take(job.id, FLOAT_BYTES * len(reference), f"{field}.vector")
        for alike in asked.values():  # of a grid of patches, all layers' rows of a token come at once
            async with self._bringing:
                rows |= await self._rows(alike)
                for one in alike:
                    self._take(job.id, sum(part.nbytes for part in rows[one.field]), f"{one.field}.from")
        return FetchedTensors(tensors, rows)

    async def _tensor(self, reference: str, field: str, reader: Account) -> torch.Tensor:
        data = await self._store.client_data.remote("tensors", "read", split(reference)[0], reader)
        if data is None:
            raise RequestError(f"there is no tensor {reference!r}", field, "tensor_not_found")
        try:
            return pick(reference, data)
        except RequestError as refused:
            raise RequestError(refused.message, field, refused.code) from refused

    async def _rows(self, asked: Sequence[_WantedRows]) -> dict[str, list[torch.Tensor]]:
        """What interventions ask for of the same tokens of one stored run, by their fields."""
        names = list(dict.fromkeys(name for one in asked for name in one.names))
        field, source = asked[0].field, asked[0].source
        try:
            read = self._reader.rows.remote(source.run_id, names, source.tokens, self._most, asked[0].reader)
            data = await survived(read, f"run {source.run_id}")
        except RequestError as refused:
            if len(asked) > 1:  # one by one, to name whose fault it is
                return {one.field: (await self._rows([one]))[one.field] for one in asked}
            named = f"{field}.{refused.field}" if refused.field else field
            raise RequestError(refused.message, named, refused.code, refused.status) from refused
        except StoreError as error:  # Ray adds the actor's traceback to what it hands on
            message = f"the activation store: {getattr(error, 'cause', error)}"
            raise RequestError(message, f"{field}.from.run_id", "store_failed", 500) from error
        if data is None:
            message = f"there is no stored run {source.run_id!r}: it is unfinished, was returned inline, or was deleted"
            raise RequestError(message, f"{field}.from.run_id", "run_not_found")
        found = load(data)
        place = {name: str(number) for number, name in enumerate(names)}
        return {one.field: [found[place[name]] for name in one.names] for one in asked}

    def _names_of(self, spec: Replace, source: StoredRows, field: str) -> list[tuple[str, ...]]:
        """For each point that an operation means, or for all of them, the names that a run may have for its rows."""
        points = self._points.named(spec.point, f"{field}.point")
        if source.point is None:
            return [(point.name, point.module) for point in points]
        names = self._names(source.point)
        if len(names) not in (1, len(points)):
            message = f"{source.point} matches {len(names)} points, but {spec.point} matches {len(points)}"
            raise RequestError(message, f"{field}.from.point")
        return names

    def _names(self, pattern: str) -> list[tuple[str, ...]]:
        """The names by which a run may have recorded what a request calls by one."""
        try:
            points = self._points.named(pattern, "from.point")
        except RequestError:
            return [(pattern,)]  # of another model, or a savepoint that this one had
        own = (pattern,) if len(points) == 1 else ()
        return [(*own, point.name, point.module) for point in points]

    def _take(self, job: str, size: int, field: str) -> None:
        """Account for bytes that a job was brought, or brings itself, where there is room for them."""
        own = self._lent.get(job, 0) + size
        if own > self._most:
            held = "the request's vectors, tensors and stored rows"
            message = f"{held} take {own} bytes, and the server's limit is {self._most}"
            raise RequestError(message, field, "rows_too_large")
        if own + sum(size for other, size in self._lent.items() if other != job) > self._most:
            message = "other requests' vectors and rows take the memory that this one needs: try again later"
            raise RequestError(message, field, "server_busy", 429)
        self._lent[job] = own
