"""What every request passes on its way in: an id, and a limit on its body."""

from __future__ import annotations

import uuid

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import ApiError


class Gate:
    """Plain ASGI, so that streams and disconnects pass through untouched."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the request, and pass it on while its body is within the limit."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope.setdefault("state", {})["request_id"] = uuid.uuid4().hex
        error = ApiError(
            413, f"the body is larger than this server's limit of {self._max} bytes", None, "body_too_large"
        )
        refuse = JSONResponse(error.body, error.status)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max:
            return await refuse(scope, receive, send)
        seen = 0

        async def receive_limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max:
                raise error
            return message

        async def send_unless_refused(message: Message) -> None:
            if seen <= self._max:  # else it is the framework's own answer to the error above
                await send(message)

        await self._app(scope, receive_limited, send_unless_refused)
        return await refuse(scope, receive, send) if seen > self._max else None
