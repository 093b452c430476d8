"""Checks of every request before its body is read: allowed hosts and origins, and API keys."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

import serve_app.http.documentation as documentation
import serve_app.http.page_files as page_files
from deployments.exposure import is_loopback
from deployments.options import Options
from serve_app.http.errors import ApiError
from serve_app.http.keys import Caller, Keys, Role
from serve_app.http.middleware import path_of

HEALTH = "/health"  # load balancers request it with any host name and without a key
OPEN = frozenset({HEALTH, "/openapi.json"}) | documentation.PATHS | page_files.PATHS  # files for browsers, without data
NO_KEY = (
    "no valid API key: send one of this server's as `Authorization: Bearer <key>`, nnsight's client as NDIF_API_KEY"
)
PROXIED = ("forwarded", "via", "x-real-ip")  # headers that only proxies send, like all of X-Forwarded-*
NNSIGHT = b"ndif-api-key"  # the header in which nnsight's clients send their key
# nnsight's clients fetch results without a key; the address contains a token that only the job's client has.
RESULT = re.compile(r"/response/[0-9a-f]{32}/result")
BEARER = HTTPBearer(auto_error=False, description="One of the operator's API keys.")  # for the documentation


class Guard:
    """Checks hosts, origins and keys, and stores the caller. Plain ASGI, so that no body is read before.

    A website can make a browser send requests to a server that only the user's machine reaches: from a page of the
    site's own origin, or through a host name of the site that resolves to 127.0.0.1. A proxy on the same machine can
    forward requests from anywhere. Without API keys, the server recognizes such requests only by their headers.
    """

    def __init__(self, app: ASGIApp, options: Options, keys: Keys) -> None:
        self._app = app
        self._keys = keys
        self._any_address = options.open
        self._origins = {origin.lower() for origin in options.cors_origins}
        hosts = set(options.allowed_hosts)
        if options.public_url:
            url = urlsplit(options.public_url)
            hosts.add(url.hostname or "")
            self._origins.add(f"{url.scheme}://{url.netloc}".lower())
        self._hosts = {name for name in hosts if name and not is_loopback(name)}  # many proxies send a loopback name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 if the host or origin is not allowed, and 401 without a valid key."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        error = None if path_of(scope) == HEALTH else self._refusal(Headers(scope=scope))
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

    def _refusal(self, headers: Headers) -> ApiError | None:
        """Why a request with these headers is rejected; None if it is accepted."""
        origin, name = headers.get("origin"), headers.get("host", "")
        is_own = origin is None or origin.partition("://")[2].lower() == name.lower()
        if not is_own and self._origins.isdisjoint(("*", str(origin).lower())):
            message = (
                f"pages of {str(origin)[:200]!r} may not use this server: its operator allows an origin with "
                "cors_origins, and names the server's own address behind a proxy with public_url"
            )
            return ApiError(403, message, "Origin", "origin_not_allowed")
        host = _hostname(name)
        if self._keys or not self._hosts.isdisjoint(("*", host)):
            return None
        is_here = is_loopback(host) or (self._any_address and _is_address(host))
        if is_here and not any(name in PROXIED or name.startswith("x-forwarded-") for name in headers):
            return None
        message = (
            "this server has no API keys and answers its own machine only, but "
            f"{'a proxy forwarded this request' if is_here else f'Host is {host[:200]!r}'}: the operator can set keys "
            "with api_keys_file, or allow another name with allowed_hosts, which a proxy must send as Host"
        )
        return ApiError(403, message, "Host", "host_not_allowed")

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


def _hostname(host: str) -> str:
    """A host without its port, in lower case; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _caller(connection: HTTPConnection) -> Caller:
    caller: Caller = connection.state.caller
    return caller


Sender = Annotated[Caller, Depends(_caller)]


async def _admin_only(sender: Sender) -> None:
    if not sender.is_admin:
        message = "the key's role does not allow it: use a key with the role admin"
        raise ApiError(403, message, None, "insufficient_permissions")


AdminOnly = Depends(_admin_only)
