"""The HTTP application without a backend, and its description, which takes a second to make."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx

from deployments.options import Options
from serve_app.api import build_api
from serve_app.http.keys import Keys

APP = build_api(SimpleNamespace(data=None), Options(), Keys())  # type: ignore[arg-type]
DESCRIPTION = APP.openapi()


def post(path: str, body: bytes, kind: str = "application/json") -> httpx.Response:
    """Its answer: of a body that fits, 500."""

    async def sent() -> httpx.Response:
        transport = httpx.ASGITransport(APP, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(path, content=body, headers={"content-type": kind})

    return asyncio.run(sent())
