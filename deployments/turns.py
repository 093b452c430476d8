"""Turns of owners at something that only one request uses at a time."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from deployments.errors import RequestError

MOST_WITHOUT_KEYS = 32  # waiting requests of all clients


class Turns:
    """A lock that goes to one owner after another, however many requests each has. Use it on one event loop.

    Attributes:
        held: The number of requests that have the lock or wait for it, by owner.
    """

    def __init__(self, what: str, most_waiting: int) -> None:
        """An owner may have `most_waiting` waiting requests, which the error calls `what`; without API keys, 32."""
        self._what, self._most = what, most_waiting
        self.held = Counter[str | None]()
        self._is_taken = False
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}  # by owner, in the order of their turns

    @contextmanager
    def place(self, owner: str | None) -> Iterator[None]:
        """Hold a place among an owner's requests; RequestError 429 if it has none left."""
        most = MOST_WITHOUT_KEYS if owner is None else self._most
        if self.held[owner] > most:
            message = f"{most} of your {self._what} wait already: try again later"
            raise RequestError(message, None, "server_busy", 429)
        self.held[owner] += 1
        try:
            yield
        finally:
            self.held[owner] -= 1

    @asynccontextmanager
    async def turn(self, owner: str | None) -> AsyncIterator[None]:
        """Have the lock in the owner's turn."""
        await self.acquire(owner)
        try:
            yield
        finally:
            self.release()

    async def acquire(self, owner: str | None) -> None:
        """Wait for the owner's turn."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(owner, deque())
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at the same time
                self.release()
            elif turn in queue:  # later ones of its owner keep their place
                queue.remove(turn)
                if not queue:
                    del self._waiting[owner]
            raise

    def release(self) -> None:
        """Give the lock to the next owner that waits."""
        while self._waiting:
            owner, turns = next(iter(self._waiting.items()))
            del self._waiting[owner]
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._is_taken = False
