"""Clients' tensor files, readouts and presets, which the activation store holds."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from starlette.requests import ClientDisconnect

from deployments.accounts import Account
from deployments.activations.facts import explained
from deployments.activations.files.disk import NEW
from deployments.activations.filters import FilePart
from deployments.readouts.spec import needed_point
from serve_app.backend.model_registry import Models
from serve_app.http.errors import ApiError, within
from serve_app.http.paging import Read

STORE_S = 30.0  # the longest wait for the activation store; a deletion waits for writes in progress


async def stored(call: Awaitable[Any]) -> Any:
    """The activation store's answer; the call continues in the store after the time limit.

    Raises:
        ApiError: 503 if it does not answer.
    """
    async with within(STORE_S, 503, "the activation store does not answer; try again"):
        return await call


@asynccontextmanager
async def _on_disk(root: Path, pieces: AsyncIterator[bytes]) -> AsyncIterator[Path]:
    """A file in the store's directory with the bytes of an upload, until the block ends; StoreError on a disk error."""
    with explained(root), NamedTemporaryFile(dir=root, prefix=NEW) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a store that starts removes those that nobody has locked
        try:
            async for piece in pieces:
                await asyncio.to_thread(file.write, piece)
        except ClientDisconnect as gone:
            raise ApiError(400, "the client left before the end of the upload") from gone
        file.flush()
        yield Path(file.name)


class ClientData:
    """One kind of client data in the store; all methods raise ApiError 404 or 503.

    A subclass names the store's `kind`, and the parts of a 404: the field, a noun, and the prefix of the error code.
    """

    kind: str
    missing: tuple[str, str, str]

    def __init__(self, store: Any) -> None:
        """Use the activation store of this handle."""
        self._store = store

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the store's `kind`."""
        return await stored(self._store.client_data.remote(self.kind, method, *args))

    async def list(self, account: Account, limit: int, after: str | None) -> list[dict[str, Any]]:
        """The items that the account may read, in the order of their names."""
        return await self.ask("list", limit, after, account)  # type: ignore[no-any-return]

    async def get(self, account: Account, name: str, *more: str | None) -> dict[str, Any]:
        """The description of an item."""
        return self._existing(name, await self.ask("get", name, account, *more))  # type: ignore[no-any-return]

    def file(self, account: Account, name: str) -> Read:
        """Reads an item as a file."""

        async def read(first: int, end: int) -> FilePart:
            description = await self.get(account, name)
            data = self._existing(name, await self.ask("read", name, account, first, end))
            return FilePart(data, first, description["bytes"])

        return read

    async def delete(self, account: Account, name: str, *more: str | None) -> None:
        """Delete an item; it is deleted when this returns. RequestError if only an admin may do so."""
        self._existing(name, await self.ask("delete", name, account, *more) or None)

    def _existing(self, name: str, item: Any) -> Any:
        if item is None:
            field, noun, code = self.missing
            raise ApiError(404, f"there is no {noun} {name!r}", field, f"{code}_not_found")
        return item


class Tensors(ClientData):
    """Safetensors files: at most `most` bytes together."""

    kind, missing = "tensors", ("tensor_id", "tensor file", "tensor")

    def __init__(self, store: Any, root: str, most: int) -> None:
        """Use the activation store of this handle, whose directory is `root`."""
        super().__init__(store)
        self._root, self._most = Path(root), most

    async def put(self, account: Account, pieces: AsyncIterator[bytes]) -> dict[str, Any]:
        """Store a file; it is on disk when this returns. RequestError if it is not allowed or there is no room."""
        async with _on_disk(self._root, pieces) as path:
            return await self.ask("put", path, self._most, account)  # type: ignore[no-any-return]


class Readouts(ClientData):
    """All readouts."""

    kind, missing = "readouts", ("name", "readout", "readout")

    def __init__(self, store: Any, root: str, models: Models, most: int) -> None:
        """Initialize the registry.

        Args:
            store: The activation store's handle.
            root: The store's directory.
            models: The served models.
            most: The most bytes of all readouts together.
        """
        super().__init__(store)
        self._root, self._models, self._most = Path(root), models, most

    async def install(
        self, account: Account, pieces: AsyncIterator[bytes], spec: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Store one; it is on disk when this returns.

        Raises:
            RequestError: It is not one, its name is taken, or there is no room for it.
            ApiError: Its model has no such point, or the point's rows have another length; 503.
        """
        async with _on_disk(self._root, pieces) as path:
            kept: dict[str, Any] = await self.ask("put", path, spec, self._most, account)
        model = self._models.get(kept["model"])
        if model and model.up:
            try:
                await model.check_readout(*self._needs(kept), kept["hidden"])
            except ApiError as refused:
                if refused.status == 400:  # at worst this deletes the same one, stored before the model was loaded
                    await self.ask("delete", kept["name"], account)
                raise
        return kept

    def _needs(self, kept: dict[str, Any]) -> tuple[str, str]:
        """The field of a request that determines the point, and the point."""
        return "spec.point", kept["point"]


class Lenses(Readouts):
    """All fitted lenses."""

    kind, missing = "lenses", ("name", "lens", "lens")

    def _needs(self, kept: dict[str, Any]) -> tuple[str, str]:
        return "file", needed_point(kept["layers"])
