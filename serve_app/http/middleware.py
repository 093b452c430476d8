"""Request ids, limits on bodies, and headers of all answers."""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.errors import ApiError

NO_SNIFF = (b"x-content-type-options", b"nosniff")
TENSORS = "/v1/tensors"  # its bodies are files, with a limit of their own
READOUTS = "/v1/readouts"  # its bodies are forms with a file, with a limit of their own
JOBS = "/request"  # nnsight's route, whose bodies are forms
BYTES = "application/octet-stream"
FORM = "multipart/form-data"
MOST_HEADERS = 64 << 10  # bytes of all headers of a request
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def path_of(scope: Scope) -> str:
    """A request's path below the application's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class RequestIds:
    """Stores each request's id and limits its headers. Plain ASGI: streams and disconnects pass through unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 431 if the headers are too large, and 400 if the request's id is malformed."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADERS:
            error = ApiError(431, f"the headers are larger than {MOST_HEADERS} bytes", None, "headers_too_large")
            return await error.response(scope)(scope, receive, send)
        # Serve's proxy generates missing request ids, and adds the id to the answer and its logs.
        request_id = dict(scope["headers"]).get(b"x-request-id") or uuid.uuid4().hex.encode()
        if not REQUEST_ID.fullmatch(request_id):
            message = "X-Request-Id: 1 to 128 letters, digits and . _ : / + = @ -"
            bad = ApiError(400, message, "X-Request-Id", "invalid_value")
            return await bad.response(scope)(scope, receive, send)
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        return await self._app(scope, receive, send)


class BodyLimits:
    """Accepts requests whose bodies have the right type and size. Plain ASGI, as above."""

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, max_tensor_file_bytes: int, max_readout_file_bytes: int
    ) -> None:
        self._app = app
        self._max_body = max_body_bytes
        self._max_tensor_file = max_tensor_file_bytes
        self._max_readout_file = max_readout_file_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 400 for a wrong type, and 413 for a body that is too large, if possible before reading it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        length = int(declared) if re.fullmatch(rb"[0-9]{1,18}", declared) else 0
        if length or b"transfer-encoding" in headers:
            given = headers.get(b"content-type", b"")[:256].partition(b";")[0].strip().lower().decode("latin-1")
            kind, _, form = given.partition("/")
            expected = _content_type(scope)
            # A page of another origin may send other types without a preflight. `application/x+json` is JSON, too.
            if expected not in (given, f"{kind}/{form.rpartition('+')[2]}"):
                message = f"send the body as {expected}, not as {given[:100] or 'nothing'}"
                error = ApiError(400, message, "Content-Type", "invalid_value")
                return await error.response(scope)(scope, receive, send)
        return await self._pass_on(scope, receive, send, length)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, declared: int) -> None:
        most, error = self._limit(scope)
        refuse = error.response(scope)
        if declared > most:
            return await refuse(scope, receive, send)
        seen = 0

        async def receive_limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > most:
                raise error
            return message

        async def send_unless_refused(message: Message) -> None:
            if seen <= most:  # otherwise it is the framework's answer to the error above
                await send(message)

        await self._app(scope, receive_limited, send_unless_refused)
        return await refuse(scope, receive, send) if seen > most else None

    def _limit(self, scope: Scope) -> tuple[int, ApiError]:
        """The most bytes of a request's body, and the error for more."""
        if path_of(scope) == TENSORS and scope["method"] == "POST":
            most, what, code = self._max_tensor_file, "a tensor file", "tensor_too_large"
        elif path_of(scope) == READOUTS and scope["method"] == "POST":
            most, what, code = self._max_readout_file, "a readout with its form", "readout_too_large"
        else:
            most, what, code = self._max_body, "the body", "body_too_large"
        return most, ApiError(413, f"{what} is larger than this server's limit of {most} bytes", None, code)


def _content_type(scope: Scope) -> str:
    """The content type of a route's bodies."""
    return {TENSORS: BYTES, JOBS: FORM, READOUTS: FORM}.get(path_of(scope), "application/json")


class NoSniff:
    """Tells browsers to trust the content type of every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the header to the start of each answer."""

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], NO_SNIFF]}
            await send(message)

        await self._app(scope, receive, send_with_header)
