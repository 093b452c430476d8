"""What every request passes on its way in: the keys, and who may do what."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

import serve_app.documentation as documentation
from serve_app.errors import ApiError
from serve_app.keys import Caller, Keys, Role

# Load balancers ask after health, and browsers open pages, without a key; the pages say the same on every server.
OPEN = frozenset({"/health", "/openapi.json"}) | documentation.PATHS
NNSIGHT = b"ndif-api-key"  # the header in which nnsight's clients send theirs
# nnsight's clients fetch results without a key; the address holds a token that only the job's client was told.
RESULT = re.compile(r"/response/[0-9a-f]{32}/result")
BEARER = HTTPBearer(auto_error=False, description="One of the operator's API keys.")  # for the documentation


class Guard:
    """Lets pass who has a key, and notes who they are. Plain ASGI, so that no body is read before."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 where there is no key, or one that is none."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        caller = self._caller(scope)
        if caller is None:
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})  # a policy violation
            message = "no valid API key: send one of this server's as `Authorization: Bearer <key>`"
            error = ApiError(401, message, None, "invalid_api_key")
            return await error.response(scope)(scope, receive, send)
        scope.setdefault("state", {})["caller"] = caller
        return await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        if not self._keys:
            return Caller(Role.ADMIN)
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if not scheme:
            scheme, key = b"bearer", headers.get(NNSIGHT, b"")
        caller = self._keys.caller(key.strip()) if scheme.lower() == b"bearer" else None
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if caller is None and (path in OPEN or RESULT.fullmatch(path)):
            return Caller(Role.USE)
        return caller


async def _caller(connection: HTTPConnection) -> Caller:
    caller: Caller = connection.state.caller
    return caller


Sender = Annotated[Caller, Depends(_caller)]


async def _admin_only(sender: Sender) -> None:
    if not sender.is_admin:
        message = "this key may use the server; what changes it for all needs a key with the role admin"
        raise ApiError(403, message, None, "insufficient_permissions")


AdminOnly = Depends(_admin_only)
