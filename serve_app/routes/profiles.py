"""Profiles of capture and interventions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

import serve_app.openapi_examples as examples
from serve_app.http.bodies import JsonRoute
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend, CallerAccount
from serve_app.routes.parameters import Id, PathId, listed
from serve_app.schemas.profiles import ProfileBody

Owner = Annotated[Id | None, Query(description="For admins: the profile's owner.")]


profiles = APIRouter(prefix="/v1/interventions", tags=["Profiles"], responses=errors(503), route_class=JsonRoute)


@profiles.post("", responses=examples.PROFILE | errors(403, 429, 504))
async def keep_profile(body: ProfileBody, backend: AppBackend, who: CallerAccount) -> dict[str, Any]:
    """Store a profile, replacing the sender's own of that name; making or changing a default needs an admin's key."""
    return await backend.keep_profile(who, body)


@profiles.get("", responses=examples.PROFILES)
async def list_profiles(
    backend: AppBackend, who: CallerAccount, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: Id | None = None
) -> dict[str, Any]:
    """List profiles without their contents, in the order of their names: `limit` of them, after the name `after`.

    An admin gets everybody's; `after` is then `name@owner`.
    """
    return listed(await backend.profiles.list(who, limit + 1, after), limit)


@profiles.get("/{name}", responses=examples.PROFILE | errors(404))
async def retrieve_profile(
    name: PathId, backend: AppBackend, who: CallerAccount, owner: Owner = None
) -> dict[str, Any]:
    """Show a profile as it was sent: the sender's own, else a default of that name."""
    return await backend.profiles.get(who, name, owner)


@profiles.delete("/{name}", responses=examples.PROFILE_DELETED | errors(403, 404))
async def delete_profile(name: PathId, backend: AppBackend, who: CallerAccount, owner: Owner = None) -> dict[str, Any]:
    """Delete a profile; it is gone when this answers. Deleting a default needs an admin's key."""
    await backend.profiles.delete(who, name, owner)
    return {"name": name, "object": "intervention_profile", "deleted": True}
