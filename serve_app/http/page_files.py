"""The page `/`: its files in `serve_app/page/`, which any browser may fetch; what they show comes by the API."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.staticfiles import StaticFiles

from serve_app.http.errors import ApiError

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
FILES = frozenset(path.name for path in FOLDER.iterdir()) - {INDEX}
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

_files = StaticFiles(directory=FOLDER)
router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """The page itself."""
    return await _sent(INDEX, request)


@router.get("/page/{name}")
async def file(name: str, request: Request) -> Response:
    """One of its scripts or its style sheet."""
    if name not in FILES:
        raise ApiError(404, f"the page has no file {name[:200]!r}", code="not_found")
    return await _sent(name, request)


async def _sent(name: str, request: Request) -> Response:
    """A file, or 304 where the browser has it."""
    response = await _files.get_response(name, request.scope)
    response.headers.update(HEADERS)
    return response
