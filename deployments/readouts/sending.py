"""Installs a readout on a server, over HTTP."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import httpx

from deployments.errors import RequestError

KEY = "VITRINE_API_KEY"  # the environment variable with the API key, if the server has keys


class InstallError(RequestError):
    """A server rejects a readout, or cannot be reached."""


def install(url: str, data: bytes, spec: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Send a readout.

    Args:
        url: The server's address.
        data: A safetensors file.
        spec: The spec, or None to use the file's metadata.

    Returns:
        The server's description of it.

    Raises:
        InstallError: The server rejects it, or cannot be reached.
    """
    headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if os.environ.get(KEY) else {}
    form = {"spec": json.dumps(spec)} if spec else None
    try:
        answer = httpx.post(
            f"{url.rstrip('/')}/v1/readouts", files={"file": ("readout", data)}, data=form, headers=headers, timeout=600
        )
        said: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise InstallError(f"{url}: {error}") from error
    if answer.is_error:
        error_body = said.get("error") or {}
        raise InstallError(str(error_body.get("message")), error_body.get("param"), str(error_body.get("code")))
    return said
