"""A limit on the memory of answers in transit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Budget:
    """Bytes that all answers together may hold. Use it on one event loop."""

    def __init__(self, most: int) -> None:
        """Initialize the budget as unused."""
        self._most = most
        self._held = 0
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes while the block runs, once there is room; a larger size is admitted alone."""
        while self._held and self._held + size > self._most:
            await self._freed.wait()
        self._held += size
        try:
            yield
        finally:  # without an await, which a cancellation would interrupt
            self._held -= size
            self._freed.set()
            self._freed = asyncio.Event()
