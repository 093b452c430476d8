"""Which requests run next: the queue, and what one prefill takes of it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from deployments.engine.batch import Batch
from deployments.engine.memory import KvMemory
from deployments.engine.outflow import Outflow
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
        tokens: The most tokens of one prefill at present, padding included; a fifth of it while streams decode.
            Both are halved when memory runs out, and doubled again, up to what the operator set, while it does not.
    """

    def __init__(self, memory: KvMemory, max_running: int, prefill_tokens: int, outflow: Outflow) -> None:
        self.waiting: deque[Row] = deque()
        self.rows = self._most_rows = max_running
        self.tokens = self._most_tokens = prefill_tokens
        self._memory = memory
        self._outflow = outflow
        self._good = 0

    def recording(self, batch: Batch) -> list[Row]:
        """Those that hold recorded rows, or may: they have slots, or lost them on the way."""
        return [row for row in batch.rows if row.recording] + [
            row for row in self.waiting if row.recording and row.recording.bytes
        ]

    def next_prefill(self, batch: Batch) -> Prefill | None:
        """The next piece of a long prompt that is under way, else as many waiting requests as fit beside a batch."""
        most = self.tokens
        if any(row.request.streamed for row in batch.decoding):  # somebody sees how long they stand still meanwhile
            most = min(most, max(LEAST_TOKENS, most // 5))
        room = self._outflow.left(self.recording(batch))
        for row in batch.parked:
            if not row.stalled:
                return Prefill([row], row.fed, [min(row.length - row.fed, most, self._bearable(row, room))])
        return self._admit(batch, most, room) if self.waiting else None

    def _admit(self, batch: Batch, most: int, room: int | None) -> Prefill | None:
        """The request that waits longest, with others of about its length; one too long begins alone."""
        admitted: list[Row] = []
        longest = 0
        candidates = self._fitting(batch)
        # Rows are padded to the longest of their prefill: of 32 questions, in their order, half would be padding.
        for row in sorted(candidates, key=lambda row: abs(row.length - candidates[0].length)):
            width, tokens = max(longest, row.length), min(most, self._bearable(row, room))
            if admitted and width * (len(admitted) + 1) > tokens:
                break
            longest, most = width, tokens
            admitted.append(row)
        for row in admitted:
            self.waiting.remove(row)
        return Prefill(admitted, 0, [min(row.length, most) for row in admitted]) if admitted else None

    def _fitting(self, batch: Batch) -> list[Row]:
        """Waiting requests, first come, first served, for which there is room: a slot, KV and capture memory."""
        fitting: list[Row] = []
        need = max((row.need for row in batch.rows), default=0)
        reserved = self._outflow.reserved(batch.rows)
        turn = True  # of who holds rows until its end: none overtakes another
        for row in self.waiting:
            reserve = row.recording.reserve if row.recording else 0
            if (reserve and not turn) or not self._outflow.admits(row, reserved):
                turn = turn and not reserve
                continue
            slots, need = len(batch) + len(fitting) + 1, max(need, row.need)
            if slots > self.rows or (slots > 1 and not self._memory.fits(slots, need)):
                break
            fitting.append(row)
            reserved += reserve
        return fitting

    def _bearable(self, row: Row, room: int | None) -> int:
        """The most tokens of a prefill with this row in it: its logits and what it records have to fit into memory."""
        most = max(LEAST_TOKENS, row.scores.most_tokens) if row.scores else self.tokens
        if room is None or row.recording is None:
            return most
        return row.recording.bearable(row.fed, most, min(LEAST_TOKENS, most), room)

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
