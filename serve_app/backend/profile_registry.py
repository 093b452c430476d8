"""Profiles of capture and interventions: kept in the activation store, applied to requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deployments.accounts import OPERATOR, Account
from deployments.errors import RequestError
from deployments.job import Job
from deployments.points.capture import Capture
from deployments.points.profiles import NONE, Profile
from serve_app.backend.client_data import ClientData
from serve_app.http.errors import UNAVAILABLE, ApiError

logger = logging.getLogger("ray.serve")
FRESH_S = 1.0  # how long an ingress uses the default profiles without asking the store
PATIENCE_S = 1.0  # the longest that a request waits for the store to report changes


class Profiles(ClientData):
    """All profiles; the defaults are cached here, so that requests without a profile need not ask for them.

    For an admin, `get` and `delete` take the owner's name after the profile's.
    """

    kind, missing = "profiles", ("name", "profile", "profile")

    def __init__(self, store: Any) -> None:
        """Initialize the registry; default profiles are fetched later.

        Args:
            store: The activation store's handle.
        """
        super().__init__(store)
        self._defaults: Mapping[str, Profile] = {}
        self._version: int | None = None
        self._asked = float("-inf")
        self._asking: asyncio.Future[None] | None = None

    async def put(self, account: Account, profile: Profile) -> dict[str, Any]:
        """Store a profile, replacing one of the same name; it is on disk when this returns.

        Raises:
            RequestError: It is too large, there are too many, or only an admin may change a default.
            ApiError: 503.
        """
        plain = Profile.model_validate(profile.model_dump(by_alias=True, exclude_unset=True))
        try:
            return await self.ask("put", plain, account)  # type: ignore[no-any-return]
        finally:
            self._forget()

    async def delete(self, account: Account, name: str, *more: str | None) -> None:
        """See `ClientData`; RequestError if only an admin may delete a default."""
        try:
            await super().delete(account, name, *more)
        finally:
            self._forget()

    async def applied(
        self, job: Job, name: str | None, model: str, capture: Capture | None, store_activations: bool | None
    ) -> Job:
        """Add the fields of the profile that a request uses to its job.

        Args:
            job: The job of the request alone.
            name: The request's profile, `none`, or None for the model's default.
            model: The model's id.
            capture: The request's field.
            store_activations: The request's field: whether to record without `capture`.

        Raises:
            RequestError: There is no such profile, or it is for another model.
            ApiError: 503.
        """
        found = await self._default(model) if name is None else await self._named(job.account, name, model)
        if found is None:
            return job
        profile, is_default = found
        job = replace(
            job,
            interventions=(*(profile.interventions or ()), *job.interventions),
            profile=profile.name,
            profiled=len(profile.interventions or ()),
            profile_account=OPERATOR if is_default else job.account,
        )
        if profile.capture is None or capture is not None or store_activations is False:
            return job
        if name is not None:
            return replace(job, capture=profile.capture, profile_captures=True)
        return replace(job, default_capture=profile.capture) if store_activations else job

    async def _named(self, account: Account, name: str, model: str) -> tuple[Profile, bool] | None:
        """A profile, and whether it is a default."""
        if name == NONE:
            return None
        found: dict[str, Any] | None = await self.ask("get", name, account)
        if found is None:
            raise RequestError(f"there is no profile {name!r}", "intervention_profile", "profile_not_found")
        profile = _profile(found)
        if profile.model not in (None, model):
            message = f"the profile {name!r} is for the model {profile.model!r}"
            raise RequestError(message, "intervention_profile", "profile_not_found")
        return profile, found["default"]

    async def _default(self, model: str) -> tuple[Profile, bool] | None:
        """A model's default profile, at most a second old.

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
            message = "the default profiles are not known yet, because the activation store does not answer; try again"
            raise ApiError(503, message, code="unavailable")
        profile = self._defaults.get(model)
        return None if profile is None else (profile, True)

    async def _ask(self) -> None:
        asked = time.monotonic()
        try:
            news = await self._store.client_data.remote("profiles", "defaults", self._version)
        except UNAVAILABLE as error:
            logger.warning("the activation store does not answer which profiles are defaults: %s", error)
            news = None
        if news is not None and (self._version is None or news[0] > self._version):
            version, defaults = news
            self._defaults = {model: _profile(found) for model, found in defaults.items()}
            self._version = version
        if self._asking is asyncio.current_task():  # otherwise a default was changed here since
            self._asked = asked

    def _forget(self) -> None:
        """Ask again before the next request: a default was changed here."""
        self._asked, self._asking = float("-inf"), None


def _profile(found: Mapping[str, Any]) -> Profile:
    return Profile.model_validate({name: value for name, value in found.items() if name in Profile.model_fields})
