"""For Serve's HTTP proxy, which is no actor of this application: what it answers when the ingress ends.

Ray reads `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` (`serve_app.RAY_ENVIRONMENT`) when the proxy starts.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.errors import ApiError


class Unanswered:
    """Answers 503 where the proxy would answer nothing, which its HTTP server makes a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        await self._app(scope, receive, send_and_note)
        if scope["type"] == "http" and not begun:
            error = ApiError(503, "the server ended before it answered, and is replaced; try again", code="unavailable")
            await error.response(scope)(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What the proxy puts before all applications."""
    return [Middleware(Unanswered)]
