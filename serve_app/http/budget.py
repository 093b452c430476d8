"""A bound on the memory of answers that are being sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Budget:
    """Bytes that so many answers may hold together. One loop's."""

    def __init__(self, most: int) -> None:
        """Initialize the budget, all of it unused."""
        self._most = most
        self._held = 0
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold so many bytes while the block runs, once there is room; alone also more than there is room for."""
        while self._held and self._held + size > self._most:
            await self._freed.wait()
        self._held += size
        try:
            yield
        finally:  # without a wait, which a cancellation would end
            self._held -= size
            self._freed.set()
            self._freed = asyncio.Event()
