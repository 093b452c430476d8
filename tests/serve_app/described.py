"""The HTTP application without a backend, and its description, which takes a second to make."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx

from deployments.options import Options
from serve_app.http.keys import Keys
from serve_app.ingress import build_api


async def _no_preset(*_: object) -> None:
    pass


_BACKEND = SimpleNamespace(presets=SimpleNamespace(chosen=_no_preset))
APP = build_api(_BACKEND, Options(), Keys())  # type: ignore[arg-type]
DESCRIPTION = APP.openapi()


def send(method: str, address: str, **request: Any) -> httpx.Response:
    """Its answer: to a request that fits, 500."""

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(APP, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, address, **request)

    return asyncio.run(answer())


def post(path: str, body: bytes) -> httpx.Response:
    return send("POST", path, content=body, headers={"content-type": "application/json"})
