"""The page `/`: serves the files in `serve_app/page/` to any browser. The data that they show comes from the API."""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serve_app.http.errors import ApiError

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
# Read once: a first view takes fifteen of them, and Serve sends an answer in one piece sooner than a file in several.
_CONTENT = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.is_file()}
_TAGS = {name: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for name, content in _CONTENT.items()}
FILES = frozenset(_CONTENT) - {INDEX}
PATHS = frozenset({"", "/", *(f"/page/{name}" for name in FILES)})  # they take no key; "" leads to "/"

# Scripts and styles are files of this server. Trusted Types allow no text to become markup or a script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a browser asks each time, so that files of two versions never meet
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """The page itself."""
    return _sent(INDEX, request)


@router.get("/page/{name}")
async def file(name: str, request: Request) -> Response:
    """One of its scripts or its style sheet."""
    if name not in FILES:
        raise ApiError(404, f"the page has no file {name[:200]!r}", code="not_found")
    return _sent(name, request)


def _sent(name: str, request: Request) -> Response:
    """A file, or 304 where the browser has it."""
    headers = HEADERS | {"ETag": _TAGS[name]}
    if _TAGS[name] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    kind, _ = mimetypes.guess_type(name)
    return Response(_CONTENT[name], headers=headers, media_type=kind)
