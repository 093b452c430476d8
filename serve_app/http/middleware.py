"""Request ids, limits on headers and bodies, and a header of all answers."""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import serve_app.http.bodies as bodies
from deployments.options import Options
from serve_app.http.errors import ApiError

# Routes whose bodies are files or forms.
TENSORS, READOUTS, LENSES, JOBS = "/v1/tensors", "/v1/readouts", "/v1/lenses", "/request"
BYTES, FORM, JSON = "application/octet-stream", "multipart/form-data", "application/json"
MOST_JOB = 16 << 20  # bytes of a block of clients' code with all that it refers to, compressed
MOST_HEADERS = 64 << 10  # bytes of all headers of a request
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def path_of(scope: Scope) -> str:
    """A request's path below the application's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class Limits:
    """Plain ASGI: streams and disconnects pass through unchanged."""

    def __init__(self, app: ASGIApp, options: Options) -> None:
        self._app = app
        self._bodies = {  # by path: the content type, the most bytes, and what an error calls it
            TENSORS: (BYTES, options.max_tensor_file_bytes, "tensor"),
            READOUTS: (FORM, options.max_readout_file_bytes, "readout"),
            LENSES: (FORM, options.max_readout_file_bytes, "lens"),
            JOBS: (FORM, MOST_JOB, "body"),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject what is malformed or too large before it is read, if possible."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        expected, most, name = self._bodies.get(path_of(scope), (JSON, bodies.MOST_BYTES, "body"))
        too_large = ApiError(413, f"the {name} is larger than the limit of {most} bytes", None, f"{name}_too_large")
        seen = 0

        async def receive_limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > most:
                raise too_large
            return message

        async def send_no_sniff(message: Message) -> None:
            if message["type"] == "http.response.start":  # browsers trust the content type
                message = {**message, "headers": [*message["headers"], (b"x-content-type-options", b"nosniff")]}
            await send(message)

        headers = dict(scope["headers"])
        # Serve's proxy generates missing request ids, and adds the id to the answer and its logs.
        request_id = headers.get(b"x-request-id") or uuid.uuid4().hex.encode()
        length = headers.get(b"content-length", b"0")
        try:
            if sum(len(key) + len(value) for key, value in scope["headers"]) > MOST_HEADERS:
                raise ApiError(431, f"the headers are larger than {MOST_HEADERS} bytes", None, "headers_too_large")
            if not REQUEST_ID.fullmatch(request_id):
                message = "X-Request-Id: 1 to 128 letters, digits and . _ : / + = @ -"
                raise ApiError(400, message, "X-Request-Id", "invalid_value")
            if length.strip(b"0") or b"transfer-encoding" in headers:
                _check_type(headers.get(b"content-type", b""), expected)
            # The length of a body that is sent in chunks is known only at its end.
            body_bytes = int(length) if re.fullmatch(rb"[0-9]{1,18}", length) else most
            if b"transfer-encoding" in headers:
                body_bytes = most
            if body_bytes > most:
                raise too_large
        except ApiError as error:
            await error.response(scope)(scope, receive, send_no_sniff)
            return
        scope.setdefault("state", {}).update(request_id=request_id.decode(), body_bytes=body_bytes)
        await self._app(scope, receive_limited, send_no_sniff)


def _check_type(given: bytes, expected: str) -> None:
    """A page of another origin may send other types without a preflight. `application/x+json` is JSON, too."""
    media_type = given[:256].partition(b";")[0].strip().lower().decode("latin-1")
    kind, _, form = media_type.partition("/")
    if expected not in (media_type, f"{kind}/{form.rpartition('+')[2]}"):
        message = f"send the body as {expected}, not as {media_type[:100] or 'nothing'}"
        raise ApiError(400, message, "Content-Type", "invalid_value")
