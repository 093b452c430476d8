"""Readouts that clients install: stored by the activation store, used by requests."""

from __future__ import annotations

from typing import Any

from deployments.activations.facts import Account
from serve_app.backend.model_registry import Models
from serve_app.backend.waiting import stored
from serve_app.http.errors import ApiError
from serve_app.http.ranges import Download


class Readouts:
    """Every readout."""

    def __init__(self, store: Any, models: Models, most: int, most_of_one: int) -> None:
        """Take what they are kept in.

        Args:
            store: The activation store's handle.
            models: Those that are served.
            most: The most bytes of all readouts together.
            most_of_one: The most of an owner's who is no admin.
        """
        self._store, self._models, self._most, self._most_of_one = store, models, most, most_of_one

    async def install(self, account: Account, data: bytes, spec: dict[str, Any] | None) -> dict[str, Any]:
        """Keep a readout; it is on disk when this returns.

        Raises:
            RequestError: It is none, its name is taken, or there is no room for it.
            ApiError: Its model has no such point, or rows of another length there; 503.
        """
        kept: dict[str, Any] = await stored(
            self._store.client_data.remote("readouts", "put", data, spec, self._most, account, self._most_of_one)
        )
        model = self._models.get(kept["model"])
        if model and model.up:
            try:
                await model.check_readout(kept["point"], kept["hidden"])
            except ApiError as refused:
                if refused.status == 400:  # the model was loaded after another of the name was installed, at the worst
                    await stored(self._store.client_data.remote("readouts", "delete", kept["name"], account))
                raise
        return kept

    async def list(self, account: Account, limit: int, after: str | None) -> list[dict[str, Any]]:
        """Readouts in the order of their names.

        Raises:
            ApiError: 503.
        """
        return await stored(self._store.client_data.remote("readouts", "list", limit, after, account))  # type: ignore[no-any-return]

    async def get(self, account: Account, name: str) -> dict[str, Any]:
        """One readout.

        Raises:
            ApiError: 404; 503.
        """
        found: dict[str, Any] | None = await stored(self._store.client_data.remote("readouts", "get", name, account))
        if found is None:
            raise _none_such(name)
        return found

    async def file(self, account: Account, name: str) -> Download:
        """A readout's file.

        Raises:
            ApiError: 404; 503.
        """
        told = await self.get(account, name)

        async def read(first: int, end: int) -> bytes:
            found: bytes | None = await stored(
                self._store.client_data.remote("readouts", "read", name, account, first, end)
            )
            if found is None:
                raise _none_such(name)
            return found

        return Download(told["id"], told["bytes"], read)

    async def delete(self, account: Account, name: str) -> None:
        """Remove a readout; it is gone when this returns.

        Raises:
            ApiError: 404; 503.
        """
        if not await stored(self._store.client_data.remote("readouts", "delete", name, account)):
            raise _none_such(name)


def _none_such(name: str) -> ApiError:
    return ApiError(404, f"there is no readout {name!r}", "name", "readout_not_found")
