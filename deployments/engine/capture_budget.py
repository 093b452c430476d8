"""The budget of host memory for captured rows that the store has not taken yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from deployments.engine.capture.buffer import PIECE_BYTES
from deployments.engine.sequence import Sequence


class CaptureBudget:
    """What was recorded and is not written yet, request by request.

    Each recording request has an equal share of the budget. Its rows go out when half of that is full; a
    request that holds more than its share stands still until some of it is written. So a slow disk slows the
    requests that record, and neither the others nor their memory. Requests for the last rows alone hold these
    until their end; half of the budget is theirs, and who does not fit into it waits.

    Attributes:
        bytes: Bytes that were handed out and are not written yet.
    """

    def __init__(self, budget: int | None) -> None:
        """Initialize the budget, all of it unused.

        Args:
            budget: Bytes of host memory; None to leave all rows with their request until its end.
        """
        self.budget = budget
        self._unwritten: Counter[str] = Counter()  # request id -> bytes; of ended requests, too
        self.bytes = 0

    def left(self, seqs: Iterable[Sequence]) -> int | None:
        """The bytes that are neither gathered by these nor unwritten; None for any number."""
        if self.budget is None:
            return None
        return max(0, self.budget - self.bytes - sum(seq.recording.bytes for seq in seqs if seq.recording))

    def reserved(self, seqs: Iterable[Sequence]) -> int:
        """The bytes that these may hold until their end."""
        return sum(seq.recording.reserve for seq in seqs if seq.recording)

    def admits(self, seq: Sequence, reserved: int) -> bool:
        """Whether a request may begin beside others that may hold so many bytes until their end."""
        if self.budget is None or seq.recording is None:
            return True
        reserve = seq.recording.reserve
        fits = not reserve or not reserved or reserved + reserve <= self.budget // 2
        return fits and self.bytes <= self.budget // 2

    def divide(self, seqs: Iterable[Sequence]) -> None:
        """Tell each of these when to hand out its rows."""
        seqs = list(seqs)
        share = self.share(seqs)
        for seq in seqs:
            if seq.recording:
                seq.recording.piece_bytes = None if share is None else min(PIECE_BYTES, share // 2)

    def share(self, seqs: Iterable[Sequence]) -> int | None:
        """The bytes that each of these that hands out its rows as they come may hold; None for any number."""
        if self.budget is None:
            return None
        seqs = [seq for seq in seqs if seq.recording]
        sharing = sum(1 for seq in seqs if seq.recording and not seq.recording.reserve)
        return max(1, (self.budget - self.reserved(seqs)) // max(1, sharing))

    def sent(self, seq: Sequence, size: int) -> None:
        """Note bytes that were handed out."""
        if self.budget is not None:
            self._unwritten[seq.request.id] += size
            self.bytes += size

    def written(self, request_id: str, size: int) -> None:
        """Note bytes that are written, or given up."""
        self.bytes -= min(size, self._unwritten[request_id])
        self._unwritten[request_id] -= size
        if self._unwritten[request_id] <= 0:
            del self._unwritten[request_id]

    def stalls(self, seq: Sequence, share: int | None) -> bool:
        """Whether a sequence holds more than its share; one that stands still goes on at half of it."""
        if share is None or seq.recording is None:
            return False
        unwritten = self._unwritten.get(seq.request.id, 0)
        return unwritten > 0 and unwritten + seq.recording.bytes > (share // 2 if seq.stalled else share)
