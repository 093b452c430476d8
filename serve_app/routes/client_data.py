"""Clients' tensor files, readouts, fitted lenses and presets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from fastapi.responses import Response

import serve_app.openapi_examples as examples
from deployments.accounts import Account
from serve_app.backend.client_data import Readouts
from serve_app.http.bodies import JsonRoute, json_object
from serve_app.http.middleware import BYTES, LENSES, READOUTS, TENSORS
from serve_app.http.paging import Ranged, page
from serve_app.http.uploads import UploadRoute
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend, CallerAccount, Id, Limit, OwnersAccount, PathId, listed
from serve_app.schemas.presets import PresetBody

tensors = APIRouter(prefix=TENSORS, tags=["Tensors"], responses=errors(503), route_class=UploadRoute)
readouts = APIRouter(prefix=READOUTS, tags=["Readouts"], responses=errors(503), route_class=UploadRoute)
lenses = APIRouter(prefix=LENSES, tags=["Lenses"], responses=errors(503), route_class=UploadRoute)
presets = APIRouter(prefix="/v1/interventions", tags=["Presets"], responses=errors(503), route_class=JsonRoute)
Sent = Annotated[UploadFile, File(description="safetensors")]
Spec = Annotated[str | None, Form(max_length=1 << 20, description="JSON; without it, the file's metadata")]
Owner = Annotated[Id | None, Query(description="For admins: the preset's owner.")]


@tensors.post("", responses=examples.TENSORS | errors(429), openapi_extra=examples.TENSOR_BODY)
async def upload_tensors(request: Request, backend: AppBackend, who: CallerAccount) -> dict[str, Any]:
    """Store a safetensors file of steering vectors or probe directions; the same bytes have the same id."""
    return await backend.tensors.put(who, request.stream())


@tensors.get("", responses=examples.TENSOR_FILES)
async def tensor_files(
    backend: AppBackend, who: OwnersAccount, limit: Limit = 100, after: Id | None = None
) -> dict[str, Any]:
    """List tensor files in the order of their ids: `limit` of them, after the id `after`."""
    return listed(await backend.tensors.list(who, limit + 1, after), limit)


@tensors.head("/{tensor_id}", include_in_schema=False)
@tensors.get("/{tensor_id}", response_class=Response, responses=examples.TENSOR_FILE | errors(404))
async def tensor_file(tensor_id: PathId, backend: AppBackend, who: OwnersAccount, asked: Ranged) -> Response:
    """Download a tensor file as it was sent, page by page."""
    return await page(asked, backend.tensors.file(who, tensor_id), BYTES)


@tensors.delete("/{tensor_id}", responses=examples.TENSORS_DELETED | errors(404))
async def delete_tensors(tensor_id: PathId, backend: AppBackend, who: OwnersAccount) -> dict[str, Any]:
    """Delete a tensor file; it is gone when this answers."""
    await backend.tensors.delete(who, tensor_id)
    return {"id": tensor_id, "object": "tensors", "deleted": True}


@readouts.post("", responses=examples.READOUT | errors(429, 504))
async def install_readout(file: Sent, backend: AppBackend, who: CallerAccount, spec: Spec = None) -> dict[str, Any]:
    """Install a linear probe, a direction, or a sparse autoencoder; if its model is served, it must fit the model."""
    return await _install(backend.readouts, file, who, spec)


@readouts.get("", responses=examples.READOUTS)
async def list_readouts(
    backend: AppBackend, who: OwnersAccount, limit: Limit = 100, after: Id | None = None
) -> dict[str, Any]:
    """List readouts in the order of their names: `limit` of them, after the name `after`."""
    return listed(await backend.readouts.list(who, limit + 1, after), limit)


@readouts.get("/{name}", responses=examples.READOUT | errors(404))
async def retrieve_readout(name: PathId, backend: AppBackend, who: OwnersAccount) -> dict[str, Any]:
    """Show a readout, without its tensors."""
    return await backend.readouts.get(who, name)


@readouts.head("/{name}/file", include_in_schema=False)
@readouts.get("/{name}/file", response_class=Response, responses=examples.TENSOR_FILE | errors(404))
async def readout_file(name: PathId, backend: AppBackend, who: OwnersAccount, asked: Ranged) -> Response:
    """A readout's file page by page: safetensors with its tensors, and what it is as the metadata `spec`."""
    return await page(asked, backend.readouts.file(who, name), BYTES)


@readouts.delete("/{name}", responses=examples.READOUT_DELETED | errors(404))
async def delete_readout(name: PathId, backend: AppBackend, who: OwnersAccount) -> dict[str, Any]:
    """Delete a readout; requests that use it continue."""
    await backend.readouts.delete(who, name)
    return {"name": name, "object": "readout", "deleted": True}


@lenses.post("", responses=examples.LENS | errors(429, 504))
async def install_lens(file: Sent, backend: AppBackend, who: CallerAccount, spec: Spec = None) -> dict[str, Any]:
    """Install a fitted lens, as `evals.lenses` writes it; if its model is served, it must fit the model."""
    return await _install(backend.lenses, file, who, spec)


@lenses.get("", responses=examples.LENSES)
async def list_lenses(
    backend: AppBackend, who: OwnersAccount, limit: Limit = 100, after: Id | None = None
) -> dict[str, Any]:
    """List fitted lenses in the order of their names: `limit` of them, after the name `after`."""
    return listed(await backend.lenses.list(who, limit + 1, after), limit)


@lenses.get("/{name}", responses=examples.LENS | errors(404))
async def retrieve_lens(name: PathId, backend: AppBackend, who: OwnersAccount) -> dict[str, Any]:
    """Show a fitted lens and its card, without its tensors."""
    return await backend.lenses.get(who, name)


@lenses.delete("/{name}", responses=examples.LENS_DELETED | errors(404))
async def delete_lens(name: PathId, backend: AppBackend, who: OwnersAccount) -> dict[str, Any]:
    """Delete a fitted lens; requests that use it continue."""
    await backend.lenses.delete(who, name)
    return {"name": name, "object": "lens", "deleted": True}


async def _install(kind: Readouts, file: UploadFile, who: Account, spec: str | None) -> dict[str, Any]:
    async def pieces() -> AsyncIterator[bytes]:
        while piece := await file.read(1 << 20):
            yield piece

    return await kind.install(who, pieces(), None if spec is None else json_object(spec.encode(), "spec"))


@presets.post("", responses=examples.PRESET | errors(403, 429, 504))
async def keep_preset(body: PresetBody, backend: AppBackend, who: CallerAccount) -> dict[str, Any]:
    """Store a preset, replacing the sender's own of that name; making or changing a default needs an admin's key."""
    return await backend.keep_preset(who, body)


@presets.get("", responses=examples.PRESETS)
async def list_presets(
    backend: AppBackend, who: CallerAccount, limit: Limit = 100, after: Id | None = None
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
