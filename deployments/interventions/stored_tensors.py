"""Fetches the tensors and rows of stored runs that interventions refer to from the activation store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load

from deployments.accounts import Account
from deployments.activations.actors.reader import survived
from deployments.activations.facts import StoreError
from deployments.client_data.tensors import pick, split
from deployments.errors import RequestError
from deployments.job import Job
from deployments.places.points import Points
from deployments.points.interventions import VECTORS, Replace, StoredRows

FLOAT_BYTES = 4  # of each number of a vector in a request


class FetchedTensors(NamedTuple):
    """The tensors and rows that interventions refer to in the activation store.

    Attributes:
        tensors: Tensors of clients' files, by their names in the request.
        rows: Intervention field -> [tokens, ...] of a stored run, for each of its points or once for all.
    """

    tensors: Mapping[str, torch.Tensor]
    rows: Mapping[str, Sequence[torch.Tensor]]


class _WantedRows(NamedTuple):
    """Rows of a stored run that an intervention requests."""

    field: str
    source: StoredRows
    reader: Account
    names: Sequence[tuple[str, ...]]  # for each point, or once for all


class StoredTensors:
    """Fetches them for one replica, within a number of bytes for all its jobs together."""

    def __init__(self, points: Points, store: Any, reader: Any, most: int) -> None:
        """Initialize without tensors.

        Args:
            points: The model's points.
            store: The activation store's handle.
            reader: Its reader's handle.
            most: The most bytes of fetched tensors and requests' own vectors, for all jobs together.
        """
        self._points = points
        self._store = store
        self._reader = reader
        self._most = most
        self._lent: dict[str, int] = {}  # job -> bytes
        self._bringing = asyncio.Lock()  # so that no more rows are fetched at a time than there is room for

    @contextlib.contextmanager
    def lending(self, job: str) -> Iterator[None]:
        """Count a job's bytes until it ends."""
        self._lent[job] = 0
        try:
            yield
        finally:
            self._lent.pop(job, None)

    async def fetch(self, job: Job) -> FetchedTensors:
        """Fetch the tensors and rows that a job's interventions refer to; `lending` counts them.

        Raises:
            RequestError: One does not exist or may not be read, its file is missing or damaged, or there is no room for
                it; names the field.
            StoreError: The disk fails.
        """
        tensors: dict[str, torch.Tensor] = {}
        rows: dict[str, list[torch.Tensor]] = {}
        readable = set[tuple[str, Account]]()
        asked: dict[Any, list[_WantedRows]] = {}
        for field, spec in job.all_changes.items():
            reader = job.reader(field)
            if isinstance(spec, Replace) and spec.rows is not None:
                wanted = _WantedRows(field, spec.rows, reader, self._names_of(spec, spec.rows, field))
                asked.setdefault((spec.rows.run_id, repr(spec.rows.tokens), reader), []).append(wanted)
            for name in VECTORS:
                reference = getattr(spec, name, None)
                if isinstance(reference, str) and (reference, reader) not in readable:
                    tensors[reference] = await self._tensor(reference, f"{field}.{name}", reader)
                    readable.add((reference, reader))
                    self._take(job.id, tensors[reference].nbytes, f"{field}.{name}")
                elif isinstance(reference, Sequence) and not isinstance(reference, str):
                    self._take(job.id, FLOAT_BYTES * len(reference), f"{field}.{name}")
        for alike in asked.values():  # in a grid of patches, all layers' rows of a token are fetched at once
            async with self._bringing:
                rows |= await self._rows(alike)
                for wanted in alike:
                    self._take(job.id, sum(part.nbytes for part in rows[wanted.field]), f"{wanted.field}.from")
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
        """Rows for the same tokens of one stored run, by the interventions' fields."""
        names = list(dict.fromkeys(name for wanted in asked for name in wanted.names))
        field, source = asked[0].field, asked[0].source
        try:
            read = self._reader.rows.remote(source.run_id, names, source.tokens, self._most, asked[0].reader)
            data = await survived(read, f"run {source.run_id}")
        except RequestError as refused:
            if len(asked) > 1:  # one by one, to name the failing one
                return {wanted.field: (await self._rows([wanted]))[wanted.field] for wanted in asked}
            named = f"{field}.{refused.field}" if refused.field else field
            raise RequestError(refused.message, named, refused.code, refused.status) from refused
        except StoreError as error:  # Ray adds the actor's traceback to the error
            message = f"the activation store: {getattr(error, 'cause', error)}"
            raise RequestError(message, f"{field}.from.run_id", "store_failed", 500) from error
        if data is None:
            message = f"there is no stored run {source.run_id!r}: it is unfinished, was returned inline, or was deleted"
            raise RequestError(message, f"{field}.from.run_id", "run_not_found")
        tensors = load(data)
        place = {name: str(number) for number, name in enumerate(names)}
        return {wanted.field: [tensors[place[name]] for name in wanted.names] for wanted in asked}

    def _names_of(self, spec: Replace, source: StoredRows, field: str) -> list[tuple[str, ...]]:
        """For each point of an operation, or for all of them, the possible names of its rows in a run."""
        points = self._points.named(spec.point, f"{field}.point")
        if source.point is None:
            return [(point.name, point.module) for point in points]
        names = self._names(source.point)
        if len(names) not in (1, len(points)):
            message = f"{source.point} matches {len(names)} points, but {spec.point} matches {len(points)}"
            raise RequestError(message, f"{field}.from.point")
        return names

    def _names(self, pattern: str) -> list[tuple[str, ...]]:
        """The names under which a run may have recorded a point with this name."""
        try:
            points = self._points.named(pattern, "from.point")
        except RequestError:
            return [(pattern,)]  # of another model, or an earlier savepoint of this one
        own = (pattern,) if len(points) == 1 else ()
        return [(*own, point.name, point.module) for point in points]

    def _take(self, job: str, size: int, field: str) -> None:
        """Count bytes of a job, fetched or its own, if there is room."""
        own = self._lent.get(job, 0) + size
        if own > self._most:
            held = "the request's vectors, tensors and stored rows"
            message = f"{held} take {own} bytes, and the server's limit is {self._most}"
            raise RequestError(message, field, "rows_too_large")
        if own + sum(size for other, size in self._lent.items() if other != job) > self._most:
            message = "other requests' vectors and rows take the memory that this one needs: try again later"
            raise RequestError(message, field, "server_busy", 429)
        self._lent[job] = own
