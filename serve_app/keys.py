"""API keys: who may use the server, and who may change what all its users share."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.options import fits_header
from serve_app.errors import ApiError

VARIABLE = "VITRINE_API_KEYS"
SHORTEST = 16  # characters of a key
# Load balancers ask after health, and browsers open pages, without a key; the pages say the same on every server.
OPEN = frozenset({"/health", "/docs", "/openapi.json"})
NNSIGHT = b"ndif-api-key"  # the header in which nnsight's clients send theirs
# nnsight's clients fetch results without a key; the address holds a token that only the job's client was told.
RESULT = re.compile(r"/response/[0-9a-f]{32}/result")
BEARER = HTTPBearer(auto_error=False, description="One of the operator's API keys.")  # for the documentation


class Role(StrEnum):
    """What a key may do: an admin also loads, unloads and deletes."""

    USE = "use"
    ADMIN = "admin"


@dataclass(frozen=True)
class Keys:
    """The operator's keys; none at all leave the server open.

    Kept as SHA-256 digests alone: what does not hold a key cannot show it, in a log, a pickle or Serve's status.
    """

    _roles: dict[bytes, Role] = field(default_factory=dict, repr=False)  # by a key's digest

    @classmethod
    def read(cls, path: str | None) -> Keys:
        """The keys of a file and of the environment's `VITRINE_API_KEYS`.

        Both hold `role:key`, apart from each other by white space; a line that begins with `#` says nothing.

        Args:
            path: The file, if there is one.

        Raises:
            ValueError: An entry is none, or where keys are to be, there are none: the server would stand open.
            OSError: The file cannot be read.
        """
        sources = {}
        if path is not None:
            sources[path] = Path(path).read_text()
        if VARIABLE in os.environ:
            sources[VARIABLE] = os.environ[VARIABLE]
        roles: dict[bytes, Role] = {}
        for source, text in sources.items():
            found = list(_entries(source, text))
            if not found:
                raise ValueError(f"{source} holds no API key; an entry is role:key")
            for digest, role in found:
                if roles.setdefault(digest, role) is not role:
                    raise ValueError(f"{source}: a key has one role, and one of these has another already")
        return cls(roles)

    def __bool__(self) -> bool:
        return bool(self._roles)

    def role(self, key: bytes) -> Role | None:
        """What a key may do; None where it is none. Takes as long for any key."""
        digest = _digest(key)
        found = None
        for known, role in self._roles.items():
            if hmac.compare_digest(known, digest):
                found = role
        return found


class Guard:
    """Lets pass who has a key, and notes its role. Plain ASGI, so that no body is read before."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 where there is no key, or one that is none."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        role = self._role(scope)
        if role is None:
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})  # a policy violation
            message = "no valid API key: send one of this server's as `Authorization: Bearer <key>`"
            error = ApiError(401, message, None, "invalid_api_key")
            return await error.response(scope)(scope, receive, send)
        scope.setdefault("state", {})["role"] = role
        return await self._app(scope, receive, send)

    def _role(self, scope: Scope) -> Role | None:
        if not self._keys:
            return Role.ADMIN
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if not scheme:
            scheme, key = b"bearer", headers.get(NNSIGHT, b"")
        role = self._keys.role(key.strip()) if scheme.lower() == b"bearer" else None
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if role is None and (path in OPEN or RESULT.fullmatch(path)):
            return Role.USE
        return role


async def _is_admin(request: Request) -> bool:
    return request.state.role is Role.ADMIN


IsAdmin = Annotated[bool, Depends(_is_admin)]


async def _admin_only(is_admin: IsAdmin) -> None:
    if not is_admin:
        message = "this key may use the server; what changes it for all needs a key with the role admin"
        raise ApiError(403, message, None, "insufficient_permissions")


AdminOnly = Depends(_admin_only)


def _entries(source: str, text: str) -> Iterator[tuple[bytes, Role]]:
    """Each key's digest and role. What is wrong is told by its line alone, since it may hold a key."""
    for number, line in enumerate(text.splitlines(), 1):
        for entry in line.split() if not line.lstrip().startswith("#") else ():
            role, _, key = entry.partition(":")
            if role not in list(Role) or len(key) < SHORTEST or not fits_header(key):
                roles = " or ".join(Role)
                raise ValueError(
                    f"{source}, line {number}: an entry is role:key, the role {roles}, the key at least "
                    f"{SHORTEST} printable ASCII characters"
                )
            yield _digest(key.encode()), Role(role)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
