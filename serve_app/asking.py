"""How long is waited for the activation store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from serve_app.errors import ApiError

STORE_S = 30.0  # the longest that a request waits for the activation store; a deletion waits for what it writes


async def stored(asked: Awaitable[Any]) -> Any:
    """What the activation store answers; what it was asked to do goes on behind the limit.

    Raises:
        ApiError: 503, where it does not answer.
    """
    try:
        async with asyncio.timeout(STORE_S):
            return await asked
    except TimeoutError as error:
        raise ApiError(503, "the activation store does not answer; try again", code="unavailable") from error
