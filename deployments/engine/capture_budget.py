"""The budget of host memory for captured rows that are not stored yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from deployments.engine.capture.buffer import PIECE_BYTES
from deployments.engine.sequence import Sequence


class CaptureBudget:
    """The recorded bytes of each request that are not stored yet.

    Each recording request has an equal share of the budget. It releases its rows when half of the share is full. A
    request that holds more than its share is paused until some of its rows are stored. A slow disk therefore slows
    only the requests that record. Requests for the last rows keep these until the end; half of the budget is
    reserved for them, and a request that does not fit into it waits.
    """

    def __init__(self, budget: int | None) -> None:
        """Initialize with unused bytes of host memory; None to keep all rows of a request until its end."""
        self.budget = budget
        self.bytes = 0  # released and not stored yet
        self._unwritten: Counter[str] = Counter()  # request id -> bytes, ended requests included

    def left(self, seqs: Iterable[Sequence]) -> int | None:
        """The bytes left beside those gathered by these sequences and those not stored yet; None for no limit."""
        if self.budget is None:
            return None
        return max(0, self.budget - self.bytes - sum(seq.recording.bytes for seq in seqs if seq.recording))

    def reserved(self, seqs: Iterable[Sequence]) -> int:
        """The bytes that these sequences may hold until their end."""
        return sum(seq.recording.reserve for seq in seqs if seq.recording)

    def admits(self, seq: Sequence, reserved: int) -> bool:
        """Whether a request may start beside others that may hold `reserved` bytes until their end."""
        if self.budget is None or seq.recording is None:
            return True
        reserve = seq.recording.reserve
        fits = not reserve or not reserved or reserved + reserve <= self.budget // 2
        return fits and self.bytes <= self.budget // 2

    def divide(self, seqs: Iterable[Sequence]) -> None:
        """Set the size at which each of these sequences releases its rows."""
        seqs = list(seqs)
        share = self.share(seqs)
        for seq in seqs:
            if seq.recording:
                seq.recording.chunk_bytes = None if share is None else min(PIECE_BYTES, share // 2)

    def share(self, seqs: Iterable[Sequence]) -> int | None:
        """The bytes that each sequence that releases its rows early may hold; None for no limit."""
        if self.budget is None:
            return None
        seqs = [seq for seq in seqs if seq.recording]
        sharing = sum(1 for seq in seqs if seq.recording and not seq.recording.reserve)
        return max(1, (self.budget - self.reserved(seqs)) // max(1, sharing))

    def sent(self, seq: Sequence, size: int) -> None:
        """Count released bytes."""
        if self.budget is not None:
            self._unwritten[seq.request.id] += size
            self.bytes += size

    def written(self, request_id: str, size: int) -> None:
        """Subtract bytes that are stored or discarded."""
        self.bytes -= min(size, self._unwritten[request_id])
        self._unwritten[request_id] -= size
        if self._unwritten[request_id] <= 0:
            del self._unwritten[request_id]

    def stalls(self, seq: Sequence, share: int | None) -> bool:
        """Whether a sequence holds more than its share; a paused one resumes at half of it."""
        if share is None or seq.recording is None:
            return False
        unwritten = self._unwritten.get(seq.request.id, 0)
        return unwritten > 0 and unwritten + seq.recording.bytes > (share // 2 if seq.stalled else share)
