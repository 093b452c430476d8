"""Time limits for calls of shared actors: the activation store, and the board of clients' jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from serve_app.http.errors import ApiError

STORE_S = 30.0  # the longest that a request waits for the activation store; a deletion waits for what it writes


async def stored(asked: Awaitable[Any]) -> Any:
    """What the activation store answers; what it was asked to do goes on after the limit.

    Raises:
        ApiError: 503, where it does not answer.
    """
    return await answered(asked, "the activation store", STORE_S)


async def answered(asked: Awaitable[Any], by: str, limit_s: float) -> Any:
    """What an actor answers.

    Args:
        asked: The call.
        by: Who it is, in words.
        limit_s: The longest to wait.

    Raises:
        ApiError: 503, where it does not answer.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await asked
    except TimeoutError as error:
        raise ApiError(503, f"{by} does not answer; try again", code="unavailable") from error
