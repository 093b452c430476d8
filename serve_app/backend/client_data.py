"""Clients' tensor files, readouts and profiles, which the activation store keeps."""

from __future__ import annotations

from typing import Any

from deployments.activations.facts import Account
from serve_app.backend.waiting import stored
from serve_app.http.errors import ApiError
from serve_app.http.ranges import Download


class ClientData:
    """What the store keeps of one kind; all methods raise ApiError 404 or 503.

    A subclass names the store's `kind`, and its words in a 404: the field, what it is, and the beginning of the code.
    """

    kind: str
    missing: tuple[str, str, str]

    def __init__(self, store: Any) -> None:
        """Ask the activation store of this handle."""
        self._store = store

    async def ask(self, method: str, *args: Any) -> Any:
        """What a method of the store's `kind` answers."""
        return await stored(self._store.client_data.remote(self.kind, method, *args))

    async def list(self, account: Account, limit: int, after: str | None) -> list[dict[str, Any]]:
        """All that the account may read, in the order of their names."""
        return await self.ask("list", limit, after, account)  # type: ignore[no-any-return]

    async def get(self, account: Account, name: str, *more: str | None) -> dict[str, Any]:
        """What one is."""
        return self._there(name, await self.ask("get", name, account, *more))  # type: ignore[no-any-return]

    async def file(self, account: Account, name: str) -> Download:
        """One as a file."""
        found = await self.get(account, name)

        async def read(first: int, end: int) -> bytes:
            return self._there(name, await self.ask("read", name, account, first, end))  # type: ignore[no-any-return]

        return Download(found["id"], found["bytes"], read)

    async def delete(self, account: Account, name: str, *more: str | None) -> None:
        """Delete one; it is gone when this returns. RequestError where only an admin may."""
        self._there(name, await self.ask("delete", name, account, *more) or None)

    def _there(self, name: str, found: Any) -> Any:
        if found is None:
            field, what, code = self.missing
            raise ApiError(404, f"there is no {what} {name!r}", field, f"{code}_not_found")
        return found


class Tensors(ClientData):
    """Safetensors files of at most `most` bytes together, and `most_of_one` of an owner who is no admin."""

    kind, missing = "tensors", ("tensor_id", "tensor file", "tensor")

    def __init__(self, store: Any, most: int, most_of_one: int) -> None:
        """Ask the activation store of this handle."""
        super().__init__(store)
        self._most, self._most_of_one = most, most_of_one

    async def put(self, account: Account, data: bytes) -> dict[str, Any]:
        """Keep a file; it is on disk when this returns. RequestError if it may not be kept, or there is no room."""
        return await self.ask("put", data, self._most, account, self._most_of_one)  # type: ignore[no-any-return]
