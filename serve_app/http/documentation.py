"""The page `/docs`: Swagger UI from an installed package, so that no script from another origin runs beside the API."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse, Response

import serve_app.http.page_files as page_files
from serve_app.http.errors import ApiError

UI = Path(str(files("fastapi_swagger.resources")))  # the files of npm's swagger-ui-dist, unchanged
FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")
START = "start.js"
PATHS = frozenset({"/docs", *(f"/docs/{name}" for name in (*FILES, START))})  # they need no key

# All addresses are relative, because the application may have a route prefix.
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Vitrine</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</html>
"""
# Swagger UI would send the description's address to a validator on the Internet.
SCRIPT = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  showExtensions: true,
  showCommonExtensions: true,
  validatorUrl: null,
});
"""
# Swagger UI's style sheet contains images as `data:`.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = page_files.HEADERS | {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
CACHED = {"Cache-Control": "max-age=3600"}  # seconds

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def page() -> Response:
    """Swagger UI with this application's description."""
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)


@router.get(f"/docs/{START}")
async def start() -> Response:
    """The script that starts Swagger UI: the policy allows no inline script."""
    return Response(SCRIPT, media_type="text/javascript", headers=CACHED)


@router.get("/docs/{name}")
async def file(name: str) -> Response:
    """One of Swagger UI's files."""
    if name not in FILES:
        raise ApiError(404, f"there is no file of the documentation named {name[:200]!r}", code="not_found")
    return FileResponse(UI / name, headers=CACHED)
