"""Clients' readouts: kept in the activation store, used by requests."""

from __future__ import annotations

from typing import Any

from deployments.accounts import Account
from serve_app.backend.client_data import ClientData
from serve_app.backend.model_registry import Models
from serve_app.http.errors import ApiError


class Readouts(ClientData):
    """All readouts."""

    kind, missing = "readouts", ("name", "readout", "readout")

    def __init__(self, store: Any, models: Models, most: int) -> None:
        """Initialize the registry.

        Args:
            store: The activation store's handle.
            models: The served models.
            most: The most bytes of all readouts together.
        """
        super().__init__(store)
        self._models, self._most = models, most

    async def install(self, account: Account, data: bytes, spec: dict[str, Any] | None) -> dict[str, Any]:
        """Store a readout; it is on disk when this returns.

        Raises:
            RequestError: It is not a readout, its name is taken, or there is no room for it.
            ApiError: Its model has no such point, or the point's rows have another length; 503.
        """
        kept: dict[str, Any] = await self.ask("put", data, spec, self._most, account)
        model = self._models.get(kept["model"])
        if model and model.up:
            try:
                await model.check_readout(kept["point"], kept["hidden"])
            except ApiError as refused:
                if refused.status == 400:  # at worst this deletes the same readout, stored before the model was loaded
                    await self.ask("delete", kept["name"], account)
                raise
        return kept
