"""The page `/`: serves the files in `serve_app/page/` to any browser. Their data come from the API."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serve_app.http.errors import ApiError

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
# Read once: a first view needs a dozen files, and Serve sends an answer in one piece faster than a file in several.
_CONTENT = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.is_file()}
_TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}  # independent of the machine's own table
FILES = frozenset(_CONTENT) - {INDEX}
# In the files' addresses, so that a browser can cache them, and files of two versions never mix.
VERSION = hashlib.sha256(b"".join(name.encode() + content for name, content in _CONTENT.items())).hexdigest()[:32]
_PAGE = _CONTENT[INDEX].replace(b'"page/', f'"page/{VERSION}/'.encode())
PATHS = frozenset({"", "/", *(f"/page/{VERSION}/{name}" for name in FILES)})  # they need no key; "" redirects to "/"

# Scripts and styles are only this server's files. Trusted Types prevent text from becoming markup or a script.
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
}
REVALIDATED_HEADERS = HEADERS | {"Cache-Control": "no-cache", "ETag": f'"{VERSION}"'}
CACHED_HEADERS = HEADERS | {"Cache-Control": "max-age=31536000, immutable"}  # seconds

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """The page itself, or 304 if the browser has it."""
    if REVALIDATED_HEADERS["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=REVALIDATED_HEADERS)
    return Response(_PAGE, headers=REVALIDATED_HEADERS, media_type="text/html")


@router.get("/page/{version}/{name}")
async def file(version: str, name: str) -> Response:
    """A script or style sheet of the page."""
    if version != VERSION or name not in FILES:
        raise ApiError(404, f"the page has no file {name[:200]!r} of this version", code="not_found")
    return Response(_CONTENT[name], headers=CACHED_HEADERS, media_type=_TYPES[Path(name).suffix])
