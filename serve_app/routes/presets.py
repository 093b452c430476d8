"""Presets: fields of requests that are stored under a name."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

import serve_app.openapi_examples as examples
from serve_app.http.bodies import JsonRoute
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend, CallerAccount
from serve_app.routes.parameters import Id, PathId, listed
from serve_app.schemas.presets import PresetBody

Owner = Annotated[Id | None, Query(description="For admins: the preset's owner.")]


presets = APIRouter(prefix="/v1/interventions", tags=["Presets"], responses=errors(503), route_class=JsonRoute)


@presets.post("", responses=examples.PRESET | errors(403, 429, 504))
async def keep_preset(body: PresetBody, backend: AppBackend, who: CallerAccount) -> dict[str, Any]:
    """Store a preset, replacing the sender's own of that name; making or changing a default needs an admin's key."""
    return await backend.keep_preset(who, body)


@presets.get("", responses=examples.PRESETS)
async def list_presets(
    backend: AppBackend, who: CallerAccount, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: Id | None = None
) -> dict[str, Any]:
    """List presets without their contents, in the order of their names: `limit` of them, after the name `after`.

    An admin gets everybody's; `after` is then `name@owner`.
    """
    return listed(await backend.presets.list(who, limit + 1, after), limit)


@presets.get("/{name}", responses=examples.PRESET | errors(404))
async def retrieve_preset(name: PathId, backend: AppBackend, who: CallerAccount, owner: Owner = None) -> dict[str, Any]:
    """Show a preset as it was sent: the sender's own, else a default of that name."""
    return await backend.presets.get(who, name, owner)


@presets.delete("/{name}", responses=examples.PRESET_DELETED | errors(403, 404))
async def delete_preset(name: PathId, backend: AppBackend, who: CallerAccount, owner: Owner = None) -> dict[str, Any]:
    """Delete a preset; it is gone when this answers. Deleting a default needs an admin's key."""
    await backend.presets.delete(who, name, owner)
    return {"name": name, "object": "preset", "deleted": True}
