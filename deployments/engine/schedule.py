"""Which requests run next: the queue, and what one prefill takes of it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from deployments.engine.batch import Batch
from deployments.engine.memory import KvMemory
from deployments.engine.row import Row

LEAST_TOKENS = 32  # of a prefill: with no memory for these, the request cannot be served
RECOVERY = 64  # forwards without a failure after which limits are doubled again


class Prefill(NamedTuple):
    """What one prefill runs.

    Attributes:
        rows: Several from their first token to their last, or one from `start` on.
        start: The position of the first token.
        counts: Tokens of each row.
    """

    rows: list[Row]
    start: int
    counts: list[int]


class Schedule:
    """Requests that wait, and the limits under which they are taken in.

    Attributes:
        waiting: First come, first served.
        rows: The most requests that may hold a slot at present.
        tokens: The most tokens of one prefill at present, padding included. Both are halved when memory runs
            out, and doubled again, up to what the operator set, while it does not.
    """

    def __init__(self, memory: KvMemory, max_running: int, prefill_tokens: int, capture_bytes: int | None) -> None:
        self.waiting: deque[Row] = deque()
        self.rows = self._most_rows = max_running
        self.tokens = self._most_tokens = prefill_tokens
        self._memory = memory
        self._capture_bytes = capture_bytes
        self._good = 0

    def next_prefill(self, batch: Batch, capture_full: bool) -> Prefill | None:
        """The next piece of a long prompt that is under way, else as many waiting requests as fit.

        Args:
            batch: Who holds slots now.
            capture_full: Whether requests that record are to wait.
        """
        for row in batch.parked:
            if not row.stalled:
                left = row.length - row.fed
                return Prefill([row], row.fed, [min(left, self._tokens_for(row))])
        return self._admit(batch, capture_full) if self.waiting else None

    def _admit(self, batch: Batch, capture_full: bool) -> Prefill | None:
        """The request that waits longest, with others of about its length; one too long begins alone."""
        admitted: list[Row] = []
        longest, budget = 0, self._most_tokens
        candidates = self._fitting(batch, capture_full)
        # Rows are padded to the longest of their prefill: of 32 questions, in their order, half would be padding.
        for row in sorted(candidates, key=lambda row: abs(row.length - candidates[0].length)):
            longest, budget = max(longest, row.length), min(budget, self._tokens_for(row))
            if admitted and longest * (len(admitted) + 1) > budget:
                break
            admitted.append(row)
        for row in admitted:
            self.waiting.remove(row)
        return Prefill(admitted, 0, [min(row.length, self._tokens_for(row)) for row in admitted]) if admitted else None

    def _fitting(self, batch: Batch, capture_full: bool) -> list[Row]:
        """Waiting requests, first come, first served, for which there are slots and KV memory."""
        fitting: list[Row] = []
        need = max((row.need for row in batch.rows), default=0)
        for row in self.waiting:
            if capture_full and row.recording:
                continue
            slots, need = len(batch) + len(fitting) + 1, max(need, row.need)
            if slots > self.rows or (slots > 1 and not self._memory.fits(slots, need)):
                break
            fitting.append(row)
        return fitting

    def _tokens_for(self, row: Row) -> int:
        """The most tokens of a prefill with this row in it: what it records has to fit into its memory, too."""
        if self._capture_bytes is None or row.recording is None:
            return self.tokens
        return min(self.tokens, max(LEAST_TOKENS, self._capture_bytes // (4 * row.recording.token_bytes)))

    def put_back(self, rows: list[Row]) -> None:
        """Let requests wait again, before all others."""
        self.waiting.extendleft(reversed(rows))

    # ---- memory

    def halve_tokens(self, tokens: int) -> bool:
        """Take less than `tokens` in the next prefills; false where that is no use any more."""
        self._good = 0
        if tokens <= LEAST_TOKENS:
            return False
        self.tokens = max(LEAST_TOKENS, tokens // 2)
        return True

    def limit_rows(self, rows: int) -> None:
        """Let no more requests than so many hold a slot for now."""
        self._good = 0
        self.rows = max(1, rows)

    def went_well(self) -> None:
        """Count a forward; after enough of them limits are loosened."""
        self._good += 1
        if self._good >= RECOVERY:
            self._good = 0
            self.rows = min(self._most_rows, 2 * self.rows)
            self.tokens = min(self._most_tokens, 2 * self.tokens)
