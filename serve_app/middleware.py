"""What every request passes on its way in: an id, and a limit on its body."""

from __future__ import annotations

import uuid

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import ApiError


class Gate:
    """Plain ASGI, so that streams and disconnects pass through untouched."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the request, read its body within the limit, and pass it on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max:
            return await self._refuse(scope, receive, send_named)
        seen = 0

        async def receive_limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max:
                raise ApiError(413, self._message, code="body_too_large")
            return message

        return await self._app(scope, receive_limited, send_named)

    @property
    def _message(self) -> str:
        return f"the body is larger than this server's limit of {self._max} bytes"

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(413, self._message, code="body_too_large")
        await JSONResponse(error.body, error.status)(scope, receive, send)
