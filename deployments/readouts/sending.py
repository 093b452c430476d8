"""Installs a readout or a fitted lens on a server, over HTTP."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Literal

from deployments.errors import RequestError
from vitrine.connection.blocking import wait
from vitrine.connection.transport import Transport, api_root
from vitrine.server_error import RequestFailed, ServerError

KEY = "VITRINE_API_KEY"  # the environment variable with the API key, if the server has keys
TIMEOUT_S = 600.0


def install(
    url: str, data: bytes, spec: Mapping[str, Any] | None = None, kind: Literal["readouts", "lenses"] = "readouts"
) -> dict[str, Any]:
    """Send a safetensors file, and a spec or None to use the file's metadata; returns the server's description.

    RequestError if the server rejects it, or cannot be reached.
    """

    async def sent() -> dict[str, Any]:
        server = Transport(api_root(url), os.environ.get(KEY), TIMEOUT_S, retries=0, parallel=1)
        try:
            return await server.upload(f"/{kind}", data, {"spec": json.dumps(spec)} if spec else {})
        finally:
            await server.close()

    try:
        return wait(sent())
    except ServerError as error:
        raise RequestError(error.message, error.param, error.code or "invalid_value", error.status) from error
    except (RequestFailed, ValueError) as error:
        raise RequestError(f"{url}: {error}") from error
