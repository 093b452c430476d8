"""Links with which a browser downloads stored activations without a key."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response, StreamingResponse

import serve_app.openapi_examples as examples
from serve_app.http.errors import ApiError
from serve_app.http.links import LASTS_S, SENT_BYTES, Link, Links
from serve_app.http.ranges import whole
from serve_app.openapi import Responses, errors
from serve_app.routes.activations import Chosen, file_of
from serve_app.routes.dependencies import AppBackend, CallerAccount
from serve_app.routes.parameters import PathId

links = APIRouter(prefix="/v1/activations", tags=["Activations"], responses=errors(404, 429, 503) | examples.IS_GONE)
_PATH = "/v1/activations/download/wzR2-cJ0bG9N4uYx8sQe7LrT1kVaM5pHd3FoI6tEgZU"
_MADE = examples.answers({"object": "download_link", "path": _PATH, "bytes": 271340, "expires_in": 60})
_SENT: Responses = {200: {"description": "All of it.", "content": examples.DATA[200]["content"]}}


async def _links(request: Request) -> Links:
    found: Links = request.app.state.links
    return found


AppLinks = Annotated[Links, Depends(_links)]


@links.post("/session/{session_id}/data", responses=_MADE)
async def link_data(chosen: Chosen, backend: AppBackend, who: CallerAccount, made: AppLinks) -> dict[str, Any]:
    """Make a link that downloads the same as `GET` once, as a whole and without a key, within a minute."""
    data = await backend.data(who, chosen)
    if data.length > SENT_BYTES:
        message = f"it has {data.length} bytes, and a link downloads at most {SENT_BYTES}: download it in pages"
        raise ApiError(413, message, None, "link_too_large")
    path = f"{links.prefix}/download/{made.make(Link(who, chosen, data.tag))}"
    return {"object": "download_link", "path": path, "bytes": data.length, "expires_in": int(LASTS_S)}


@links.get("/download/{token}", response_class=Response, responses=_SENT)
async def linked_data(token: PathId, backend: AppBackend, made: AppLinks) -> Response:
    """Download the file of a link; each link works once."""
    link = made.take(token)
    data = await backend.data(link.account, link.choice, link.tag)
    kind, headers = file_of(link.choice)
    # A client that closes the connection after the last byte has received it.
    headers |= {"Content-Length": str(data.length), "Connection": "close"}
    pieces = whole(data.read, data.length, made.budgets[link.account.owner])
    return StreamingResponse(pieces, headers=headers, media_type=kind)
