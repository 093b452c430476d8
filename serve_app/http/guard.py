"""Checks of every request before its body is read: allowed hosts and origins, and API keys."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

import serve_app.http.documentation as documentation
import serve_app.http.page_files as page_files
from deployments.options import Options
from serve_app.http.errors import ApiError
from serve_app.http.hosts import Hosts
from serve_app.http.keys import Caller, Keys, Role
from serve_app.http.middleware import path_of

HEALTH = "/health"  # load balancers request it with any host name and without a key
OPEN = frozenset({HEALTH, "/openapi.json"}) | documentation.PATHS | page_files.PATHS  # files for browsers, without data
NO_KEY = (
    "no valid API key: send one of this server's as `Authorization: Bearer <key>`, nnsight's client as NDIF_API_KEY"
)
NNSIGHT = b"ndif-api-key"  # the header in which nnsight's clients send their key
# nnsight's clients fetch results without a key; the address contains a token that only the job's client has.
RESULT = re.compile(r"/response/[0-9a-f]{32}/result")
BEARER = HTTPBearer(auto_error=False, description="One of the operator's API keys.")  # for the documentation


class Guard:
    """Checks hosts, origins and keys, and stores the caller. Plain ASGI, so that no body is read before."""

    def __init__(self, app: ASGIApp, options: Options, keys: Keys) -> None:
        self._app = app
        self._hosts = Hosts(options, bool(keys))
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 if the host or origin is not allowed, and 401 without a valid key."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        error = None if path_of(scope) == HEALTH else self._hosts.refusal(Headers(scope=scope))
        caller = self._caller(scope)
        if caller is None:
            error = error or ApiError(401, NO_KEY, None, "invalid_api_key")
        if error is None:
            scope.setdefault("state", {})["caller"] = caller
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            if error.status == 401:
                return await error.close(WebSocket(scope, receive, send))
            return await send({"type": "websocket.close", "code": 1008})  # pages of other origins get no socket
        return await error.response(scope)(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        if not self._keys:
            return Caller(Role.ADMIN)
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if not scheme:
            scheme, key = b"bearer", headers.get(NNSIGHT, b"")
        caller = self._keys.caller(key.strip()) if scheme.lower() == b"bearer" else None
        path = path_of(scope)
        if caller is None and (path in OPEN or RESULT.fullmatch(path)):
            return Caller(Role.USE)
        return caller


async def _caller(connection: HTTPConnection) -> Caller:
    caller: Caller = connection.state.caller
    return caller


Sender = Annotated[Caller, Depends(_caller)]


async def _admin_only(sender: Sender) -> None:
    if not sender.is_admin:
        message = "the key's role does not allow it: use a key with the role admin"
        raise ApiError(403, message, None, "insufficient_permissions")


AdminOnly = Depends(_admin_only)
