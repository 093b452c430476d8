"""A cache of readouts' tensors on a replica's device, bounded in bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

import torch

from deployments.accounts import Account
from deployments.errors import RequestError
from deployments.readouts.files import define
from deployments.readouts.values import Readout


class NamedReadout(NamedTuple):
    """The field of a request that names a readout, and the account that may read it."""

    field: str
    reader: Account


class ReadoutCache:
    """The readouts used last; those of running requests are kept."""

    def __init__(
        self,
        model: str,
        device: torch.device,
        store: Any,
        most: int,
        pool: Executor,
        batch_invariant: bool = False,
    ) -> None:
        """Initialize an empty cache.

        Args:
            model: The model's id for clients.
            device: The model's device.
            store: The activation store's handle.
            most: The most bytes of all held readouts.
            pool: Prepares tensors outside the event loop.
            batch_invariant: Give values the same bits in any batch.
        """
        self._model, self._device, self._store, self._most, self._pool = model, device, store, most, pool
        self._batch_invariant = batch_invariant
        self._held: OrderedDict[str, Readout] = OrderedDict()  # by id
        self._used: dict[str, set[str]] = {}  # job -> ids
        self._bringing = asyncio.Lock()

    @contextlib.contextmanager
    def lending(self, job: str) -> Iterator[None]:
        """Keep a job's readouts until the job ends."""
        self._used[job] = set()
        try:
            yield
        finally:
            self._used.pop(job, None)

    async def fetch(self, job: str, named: Mapping[str, NamedReadout]) -> dict[str, Readout]:
        """The readouts that a job names, by their names.

        Args:
            job: The job's id.
            named: The names.

        Raises:
            RequestError: A readout does not exist, is for another model, or does not fit; names the field.
            StoreError: The disk fails.
        """
        found = {}
        for name, (field, reader) in named.items():
            known: Mapping[str, Any] | None = await self._store.client_data.remote("readouts", "get", name, reader)
            if known is None:
                raise RequestError(f"there is no readout {name!r}", field, "readout_not_found")
            if known["model"] != self._model:
                message = f"the readout {name!r} is for the model {known['model']!r}"
                raise RequestError(message, field, "readout_not_found")
            async with self._bringing:
                found[name] = await self._one(job, name, known["id"], named[name])
        return found

    async def _one(self, job: str, name: str, id: str, named: NamedReadout) -> Readout:
        field, reader = named
        if id not in self._held:
            data: bytes | None = await self._store.client_data.remote("readouts", "read", name, reader)
            if data is None:
                raise RequestError(f"there is no readout {name!r}", field, "readout_not_found")
            self._make_room(len(data), job, field)
            loop = asyncio.get_running_loop()
            self._held[id] = await loop.run_in_executor(
                self._pool, lambda: Readout(define(data), self._device, self._batch_invariant)
            )
            self._make_room(0, job, field, keep=id)
        self._held.move_to_end(id)
        self._used.setdefault(job, set()).add(id)
        return self._held[id]

    def _make_room(self, size: int, job: str, field: str, keep: str | None = None) -> None:
        """Drop readouts that no request uses, the oldest first, until `size` more bytes fit."""
        used = {id for ids in self._used.values() for id in ids} | {keep}
        for id in [id for id in self._held if id not in used]:
            if self._bytes + size <= self._most:
                return
            del self._held[id]
        if self._bytes + size <= self._most:
            return
        if keep:
            size += self._held.pop(keep).bytes
        own = sum(self._held[id].bytes for id in self._used.get(job, ()))
        if own + size > self._most or own == self._bytes:
            message = f"the request's readouts take at least {own + size} bytes, and the server's limit is {self._most}"
            raise RequestError(message, field, "readouts_too_large")
        message = "other requests' readouts take the memory that this one needs: try again later"
        raise RequestError(message, field, "server_busy", 429)

    @property
    def _bytes(self) -> int:
        return sum(one.bytes for one in self._held.values())
