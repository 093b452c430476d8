"""Clients' tensor files."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query
from fastapi.responses import Response

import serve_app.openapi_examples as examples
from serve_app.http.middleware import BYTES, TENSORS
from serve_app.http.ranges import Ranged, page
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend, CallerAccount
from serve_app.routes.parameters import Id, PathId, listed

tensors = APIRouter(prefix=TENSORS, tags=["Tensors"], responses=errors(503))


@tensors.post("", responses=examples.TENSORS)
async def upload_tensors(
    data: Annotated[bytes, Body(media_type=BYTES)], backend: AppBackend, who: CallerAccount
) -> dict[str, Any]:
    """Store a safetensors file of steering vectors or probe directions; the same bytes have the same id."""
    return await backend.tensors.put(who, data)


@tensors.get("", responses=examples.TENSOR_FILES)
async def tensor_files(
    backend: AppBackend, who: CallerAccount, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: Id | None = None
) -> dict[str, Any]:
    """List tensor files in the order of their ids: `limit` of them, after the id `after`."""
    return listed(await backend.tensors.list(who, limit + 1, after), limit)


@tensors.head("/{tensor_id}", include_in_schema=False)
@tensors.get("/{tensor_id}", response_class=Response, responses=examples.TENSOR_FILE | errors(404))
async def tensor_file(tensor_id: PathId, backend: AppBackend, who: CallerAccount, asked: Ranged) -> Response:
    """Download a tensor file as it was sent, page by page."""
    return await page(asked, backend.tensors.file(who, tensor_id), BYTES)


@tensors.delete("/{tensor_id}", responses=examples.TENSORS_DELETED | errors(404))
async def delete_tensors(tensor_id: PathId, backend: AppBackend, who: CallerAccount) -> dict[str, Any]:
    """Delete a tensor file; it is gone when this answers."""
    await backend.tensors.delete(who, tensor_id)
    return {"id": tensor_id, "object": "tensors", "deleted": True}
