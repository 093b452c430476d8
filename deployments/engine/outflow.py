"""Captured rows on their way out of the engine, under one budget of host memory."""

from __future__ import annotations

from collections import Counter

from deployments.engine.row import Row


class Outflow:
    """What was recorded and is not written yet, request by request.

    Each recording request has an equal share of the budget. Its rows go out when half of that is full; a
    request that holds more than its share stands still until some of it is written. So a slow disk slows the
    requests that record, and neither the others nor their memory.
    """

    def __init__(self, budget: int | None) -> None:
        """Hold nothing yet.

        Args:
            budget: Bytes of host memory; None to leave all rows with their request until its end.
        """
        self._budget = budget
        self._unwritten: Counter[str] = Counter()  # request id -> bytes; of ended requests, too

    @property
    def bytes(self) -> int:
        """Bytes that were handed out and are not written yet."""
        return self._unwritten.total()

    @property
    def full(self) -> bool:
        """Whether no further recording request should begin."""
        return self._budget is not None and self.bytes > self._budget // 2

    def piece(self, recording: int) -> int | None:
        """The bytes at which one of so many recording requests hands out its rows."""
        return None if self._budget is None else max(1, self._budget // (2 * max(1, recording)))

    def sent(self, row: Row, size: int) -> None:
        """Note bytes that were handed out."""
        if self._budget is not None:
            self._unwritten[row.request.id] += size

    def written(self, request_id: str, size: int) -> None:
        """Note bytes that are written, or given up."""
        self._unwritten[request_id] -= size
        if self._unwritten[request_id] <= 0:
            del self._unwritten[request_id]

    def stalls(self, row: Row, recording: int) -> bool:
        """Whether a row holds more than its share; one that stands still goes on at half of it."""
        if self._budget is None or row.recording is None:
            return False
        unwritten = self._unwritten.get(row.request.id, 0)
        share = self._budget // max(1, recording)
        return unwritten > 0 and unwritten + row.recording.bytes > (share // 2 if row.stalled else share)
