"""Time limits for calls of shared actors: the activation store and the job board."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from serve_app.http.errors import ApiError

STORE_S = 30.0  # the longest wait for the activation store; a deletion waits for writes in progress


async def stored(asked: Awaitable[Any]) -> Any:
    """The activation store's answer; the call continues in the store after the time limit.

    Raises:
        ApiError: 503 if it does not answer.
    """
    return await answered(asked, "the activation store", STORE_S)


async def answered(asked: Awaitable[Any], by: str, limit_s: float) -> Any:
    """An actor's answer.

    Args:
        asked: The call.
        by: The actor's name for the message.
        limit_s: The longest wait.

    Raises:
        ApiError: 503 if it does not answer.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await asked
    except TimeoutError as error:
        raise ApiError(503, f"{by} does not answer; try again", code="unavailable") from error
