"""Readouts that clients install."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Query, UploadFile
from fastapi.responses import Response

import serve_app.openapi_examples as examples
from serve_app.http.bodies import json_object
from serve_app.http.middleware import BYTES, READOUTS
from serve_app.http.ranges import Ranged, page
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend, CallerAccount
from serve_app.routes.parameters import Id, PathId, listed

readouts = APIRouter(prefix=READOUTS, tags=["Readouts"], responses=errors(503))


@readouts.post("", responses=examples.READOUT | errors(504))
async def install_readout(
    file: Annotated[UploadFile, File(description="safetensors")],
    backend: AppBackend,
    who: CallerAccount,
    spec: Annotated[str | None, Form(max_length=1 << 20, description="JSON; without it, the file's metadata")] = None,
) -> dict[str, Any]:
    """Install a linear probe, a direction, or a sparse autoencoder; if its model is served, it must fit the model."""
    return await backend.readouts.install(
        who, await file.read(), None if spec is None else json_object(spec.encode(), "spec")
    )


@readouts.get("", responses=examples.READOUTS)
async def list_readouts(
    backend: AppBackend, who: CallerAccount, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: Id | None = None
) -> dict[str, Any]:
    """List readouts in the order of their names: `limit` of them, after the name `after`."""
    return listed(await backend.readouts.list(who, limit + 1, after), limit)


@readouts.get("/{name}", responses=examples.READOUT | errors(404))
async def retrieve_readout(name: PathId, backend: AppBackend, who: CallerAccount) -> dict[str, Any]:
    """Show a readout, without its tensors."""
    return await backend.readouts.get(who, name)


@readouts.head("/{name}/file", include_in_schema=False)
@readouts.get("/{name}/file", response_class=Response, responses=examples.TENSOR_FILE | errors(404))
async def readout_file(name: PathId, backend: AppBackend, who: CallerAccount, asked: Ranged) -> Response:
    """A readout's file page by page: safetensors with its tensors, and what it is as the metadata `spec`."""
    return await page(asked, backend.readouts.file(who, name), BYTES)


@readouts.delete("/{name}", responses=examples.READOUT_DELETED | errors(404))
async def delete_readout(name: PathId, backend: AppBackend, who: CallerAccount) -> dict[str, Any]:
    """Delete a readout; requests that use it continue."""
    await backend.readouts.delete(who, name)
    return {"name": name, "object": "readout", "deleted": True}
