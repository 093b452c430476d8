"""Bodies that are files or forms: their bytes are limited for each owner and in all before any of them is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from serve_app.http.errors import ApiError

SMALL = 1 << 20  # bytes of a body that is not counted, as those of JSON are not
TOGETHER = 2  # all owners' bytes relative to one's


class Uploads:
    """The bytes of bodies that are being received. Serve's proxy and the ingress may hold them in memory."""

    def __init__(self, most: int) -> None:
        """An owner's bodies may have `most` bytes together, those of all twice as many."""
        self._most = most
        self._held = Counter[str | None]()  # by owner

    @contextmanager
    def hold(self, owner: str | None, size: int) -> Iterator[None]:
        """Count the bytes of a body while the block runs; ApiError 429 if there is no room for them."""
        own, all_owners = self._held[owner] + size, self._held.total() + size
        if own > self._most or all_owners > TOGETHER * self._most:
            limit = "one key" if own > self._most else "all keys"
            most = self._most if own > self._most else TOGETHER * self._most
            message = f"the uploads in progress of {limit} may take {most} bytes together: try again later"
            raise ApiError(429, message, None, "server_busy")
        self._held[owner] += size
        try:
            yield
        finally:
            self._held[owner] -= size


class UploadRoute(APIRoute):
    """A route that reads a body once there is room for it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls with each request, before it reads the body."""
        handle = super().get_route_handler()

        async def handle_within(request: Request) -> Response:
            if request.state.body_bytes <= SMALL:
                return await handle(request)
            uploads: Uploads = request.app.state.uploads
            with uploads.hold(request.state.caller.owner, request.state.body_bytes):
                return await handle(request)

        return handle_within
