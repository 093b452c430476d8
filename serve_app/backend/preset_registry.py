"""Presets: kept in the activation store, merged below requests."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from deployments.accounts import OPERATOR, Account
from deployments.client_data.presets import StoredPreset
from deployments.errors import RequestError
from serve_app.backend.client_data import ClientData
from serve_app.http.errors import UNAVAILABLE, ApiError
from serve_app.schemas.presets import NONE, PresetBody, Settings

logger = logging.getLogger("ray.serve")
FRESH_S = 1.0  # how long an ingress uses the default presets without asking the store
PATIENCE_S = 1.0  # the longest that a request waits for the store to report changes


class ChosenPreset(NamedTuple):
    """The preset that a request uses.

    Attributes:
        name: Its name.
        fields: The request's fields that it holds, as they were sent.
        account: Whose names the fields refer to: who wrote it.
        by_default: Whether it is used because the request names none.
    """

    name: str
    fields: dict[str, Any]
    account: Account
    by_default: bool


class Presets(ClientData):
    """All presets; the defaults are cached here, so that requests without a preset need not ask for them.

    For an admin, `get` and `delete` take the owner's name after the preset's.
    """

    kind, missing = "presets", ("name", "preset", "preset")

    def __init__(self, store: Any) -> None:
        """Initialize the registry; default presets are fetched later.

        Args:
            store: The activation store's handle.
        """
        super().__init__(store)
        self._defaults: Mapping[str, ChosenPreset] = {}
        self._version: int | None = None
        self._asked = float("-inf")
        self._asking: asyncio.Future[None] | None = None

    async def prepare(self) -> None:
        """Fetch the default presets, so that the first requests need not wait for the store."""
        self._asking = asyncio.ensure_future(self._ask())
        await self._asking

    async def put(self, account: Account, preset: PresetBody) -> dict[str, Any]:
        """Store a preset, replacing one of the same name; it is on disk when this returns.

        Raises:
            RequestError: It is too large, there are too many, or only an admin may change a default.
            ApiError: 503.
        """
        fields = preset.model_dump(mode="json", by_alias=True, exclude_unset=True)
        try:
            return await self.ask("put", fields, account)  # type: ignore[no-any-return]
        finally:
            self._forget()

    async def delete(self, account: Account, name: str, *more: str | None) -> None:
        """See `ClientData`; RequestError if only an admin may delete a default."""
        try:
            await super().delete(account, name, *more)
        finally:
            self._forget()

    async def chosen(self, account: Account, name: str | None, model: str) -> ChosenPreset | None:
        """The preset of a request.

        Args:
            account: The sender.
            name: The preset that the request names, `none`, or None for the model's default.
            model: The model's id.

        Raises:
            RequestError: There is no such preset, or it is for another model.
            ApiError: 503.
        """
        if name is None:
            return await self._default(model)
        if name == NONE:
            return None
        stored: StoredPreset | None = await self.ask("find", name, account)
        if stored is None or stored.model not in (None, model):
            reason = f"the preset {name!r} is for {stored.model!r}" if stored else f"there is no preset {name!r}"
            raise RequestError(reason, "preset", "preset_not_found")
        return _chosen(stored, account)

    async def _default(self, model: str) -> ChosenPreset | None:
        """A model's default preset, at most a second old.

        While the store does not answer, the last known one is used.

        Raises:
            ApiError: 503 if none was ever known.
        """
        if time.monotonic() - self._asked > FRESH_S:
            asking = self._asking
            if asking is None or asking.done():
                asking = self._asking = asyncio.ensure_future(self._ask())
            await asyncio.wait([asking], timeout=PATIENCE_S)
            if not asking.done() and self._asking is asking:  # otherwise a default was changed here since
                self._asked = time.monotonic()
        if self._version is None:
            message = "the default presets are not known yet, because the activation store does not answer; try again"
            raise ApiError(503, message, code="unavailable")
        return self._defaults.get(model)

    async def _ask(self) -> None:
        asked = time.monotonic()
        try:
            news = await self._store.client_data.remote("presets", "defaults", self._version)
        except UNAVAILABLE as error:
            logger.warning("the activation store does not answer which presets are defaults: %s", error)
            news = None
        if news is not None and (self._version is None or news[0] > self._version):
            self._version, defaults = news
            self._defaults = {model: _chosen(preset)._replace(by_default=True) for model, preset in defaults.items()}
        if self._asking is asyncio.current_task():  # otherwise a default was changed here since
            self._asked = asked

    def _forget(self) -> None:
        """Ask again before the next request: a default was changed here."""
        self._asked, self._asking = float("-inf"), None


def _chosen(stored: StoredPreset, account: Account = OPERATOR) -> ChosenPreset:
    """A preset as a request of this account uses it."""
    fields = {name: value for name, value in json.loads(stored.body).items() if name in Settings.model_fields}
    # Only admins make defaults, and these apply to users who may not read what they refer to.
    writer = Account(stored.owner, is_admin=True) if stored.is_default else account
    return ChosenPreset(stored.name, fields, writer, by_default=False)
