"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

EACH_S = 0.02  # between two looks


def until(
    look: Callable[[], Any],
    fits: Callable[[Any], bool] = bool,
    limit_s: float = 60,
    describe: Callable[[Any], str] = "it is still {}".format,
) -> Any:
    """Call `look` until its result fits, and return that. After `limit_s` the test fails with its description."""
    deadline = time.monotonic() + limit_s
    while not fits(seen := look()):
        assert time.monotonic() < deadline, f"after {limit_s} s: {describe(seen)}"
        time.sleep(EACH_S)
    return seen


async def wait_until(condition: Callable[[], object], limit_s: float = 60) -> None:
    """The same on an event loop, whose other tasks go on; the condition may be a coroutine function."""
    async with asyncio.timeout(limit_s):
        while not (await found if inspect.isawaitable(found := condition()) else found):
            await asyncio.sleep(EACH_S)
