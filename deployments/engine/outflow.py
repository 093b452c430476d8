"""Captured rows on their way out of the engine, under one budget of host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from deployments.engine.recording import PIECE_BYTES
from deployments.engine.row import Row


class Outflow:
    """What was recorded and is not written yet, request by request.

    Each recording request has an equal share of the budget. Its rows go out when half of that is full; a
    request that holds more than its share stands still until some of it is written. So a slow disk slows the
    requests that record, and neither the others nor their memory. Requests for the last rows alone hold these
    until their end; half of the budget is theirs, and who does not fit into it waits.
    """

    def __init__(self, budget: int | None) -> None:
        """Hold nothing yet.

        Args:
            budget: Bytes of host memory; None to leave all rows with their request until its end.
        """
        self.budget = budget
        self._unwritten: Counter[str] = Counter()  # request id -> bytes; of ended requests, too

    @property
    def bytes(self) -> int:
        """Bytes that were handed out and are not written yet."""
        return self._unwritten.total()

    def left(self, rows: Iterable[Row]) -> int | None:
        """The bytes that are neither gathered by these nor unwritten; None for any number."""
        if self.budget is None:
            return None
        return max(0, self.budget - self.bytes - sum(row.recording.bytes for row in rows if row.recording))

    def reserved(self, rows: Iterable[Row]) -> int:
        """The bytes that these may hold until their end."""
        return sum(row.recording.reserve for row in rows if row.recording)

    def admits(self, row: Row, reserved: int) -> bool:
        """Whether a request may begin beside others that may hold so many bytes until their end."""
        if self.budget is None or row.recording is None:
            return True
        reserve = row.recording.reserve
        fits = not reserve or not reserved or reserved + reserve <= self.budget // 2
        return fits and self.bytes <= self.budget // 2

    def divide(self, rows: Iterable[Row]) -> None:
        """Tell each of these when to hand out its rows."""
        rows = list(rows)
        share = self.share(rows)
        for row in rows:
            if row.recording:
                row.recording.piece_bytes = None if share is None else min(PIECE_BYTES, share // 2)

    def share(self, rows: Iterable[Row]) -> int | None:
        """The bytes that each of these that hands out its rows as they come may hold; None for any number."""
        if self.budget is None:
            return None
        rows = [row for row in rows if row.recording]
        sharing = sum(1 for row in rows if row.recording and not row.recording.reserve)
        return max(1, (self.budget - self.reserved(rows)) // max(1, sharing))

    def sent(self, row: Row, size: int) -> None:
        """Note bytes that were handed out."""
        if self.budget is not None:
            self._unwritten[row.request.id] += size

    def written(self, request_id: str, size: int) -> None:
        """Note bytes that are written, or given up."""
        self._unwritten[request_id] -= size
        if self._unwritten[request_id] <= 0:
            del self._unwritten[request_id]

    def stalls(self, row: Row, share: int | None) -> bool:
        """Whether a row holds more than its share; one that stands still goes on at half of it."""
        if share is None or row.recording is None:
            return False
        unwritten = self._unwritten.get(row.request.id, 0)
        return unwritten > 0 and unwritten + row.recording.bytes > (share // 2 if row.stalled else share)
