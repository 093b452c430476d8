"""Which requests run next: the queue, and what one prefill takes of it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from deployments.engine.batch import Batch
from deployments.engine.capture_budget import CaptureBudget
from deployments.engine.kv_memory import KvMemory
from deployments.engine.sequence import Sequence

MIN_PREFILL_TOKENS = 32  # of a prefill: with no memory for these, the request cannot be served
RECOVERY_FORWARDS = 64  # forwards without a failure after which limits are doubled again


class Prefill(NamedTuple):
    """What one prefill runs.

    Attributes:
        sequences: Several from their first token to their last, or one from `start` on.
        start: The position of the first token.
        counts: Tokens of each sequence.
    """

    sequences: list[Sequence]
    start: int
    counts: list[int]


class Scheduler:
    """Requests that wait, and the limits under which they are taken in.

    Attributes:
        waiting: First come, first served.
        max_sequences: The most requests that may hold a slot at present.
        tokens: The most tokens of one prefill at present, padding included; a fifth of it while streams decode.
            Both are halved when memory runs out, and doubled again, up to what the operator set, while it does not.
    """

    def __init__(self, memory: KvMemory, max_running: int, prefill_tokens: int, capture_budget: CaptureBudget) -> None:
        self.waiting: deque[Sequence] = deque()
        self.max_sequences = self._most_sequences = max_running
        self.tokens = self._most_tokens = prefill_tokens
        self._memory = memory
        self._capture_budget = capture_budget
        self._good = 0
        self._after_piece = False  # the last prefill was a piece of a long prompt

    def recording(self, batch: Batch) -> list[Sequence]:
        """Those that hold recorded rows, or may: they have slots, or lost them on the way."""
        return [seq for seq in batch.sequences if seq.recording] + [
            seq for seq in self.waiting if seq.recording and seq.recording.bytes
        ]

    def next_prefill(self, batch: Batch) -> Prefill | None:
        """The next piece of a long prompt that is under way, else as many waiting requests as fit beside a batch."""
        most = self.tokens
        if any(seq.request.streamed for seq in batch.decoding):  # somebody sees how long they stand still meanwhile
            most = min(most, max(MIN_PREFILL_TOKENS, most // 5))
        room = self._capture_budget.left(self.recording(batch))
        parked = next((seq for seq in batch.parked if not seq.stalled), None)
        if parked is None or self._after_piece:  # pieces and admissions take turns: a long prompt stops no short one
            admitted = self._admit(batch, most, room, whole=parked is not None) if self.waiting else None
            self._after_piece = admitted is not None and admitted.counts[0] < admitted.sequences[0].length
            if admitted or parked is None:
                return admitted
        self._after_piece = True
        return Prefill([parked], parked.fed, [min(parked.length - parked.fed, most, self._bearable(parked, room))])

    def _admit(self, batch: Batch, most: int, room: int | None, whole: bool) -> Prefill | None:
        """The request that waits longest, with others of about its length; one too long begins alone.

        Args:
            batch: Those that have slots.
            most: Tokens of the prefill.
            room: Bytes for what is recorded; None without a limit.
            whole: Only requests whose prompt is no longer than that: a longer one is under way.
        """
        admitted: list[Sequence] = []
        longest = 0
        candidates = [seq for seq in self._fitting(batch) if not whole or seq.length <= most]
        # Sequences are padded to the longest of their prefill: of 32 questions, in their order, half would be padding.
        for seq in sorted(candidates, key=lambda seq: abs(seq.length - candidates[0].length)):
            width, tokens = max(longest, seq.length), min(most, self._bearable(seq, room))
            if admitted and width * (len(admitted) + 1) > tokens:
                break
            longest, most = width, tokens
            admitted.append(seq)
        for seq in admitted:
            self.waiting.remove(seq)
        return Prefill(admitted, 0, [min(seq.length, most) for seq in admitted]) if admitted else None

    def _fitting(self, batch: Batch) -> list[Sequence]:
        """Waiting requests, first come, first served, for which there is room: a slot, KV and capture memory."""
        fitting: list[Sequence] = []
        need = max((seq.need for seq in batch.sequences), default=0)
        reserved = self._capture_budget.reserved(batch.sequences)
        turn = True  # of who holds rows until its end: none overtakes another
        for seq in self.waiting:
            reserve = seq.recording.reserve if seq.recording else 0
            if (reserve and not turn) or not self._capture_budget.admits(seq, reserved):
                turn = turn and not reserve
                continue
            slots, need = len(batch) + len(fitting) + 1, max(need, seq.need)
            if slots > self.max_sequences or (slots > 1 and not self._memory.fits(slots, need)):
                break
            fitting.append(seq)
            reserved += reserve
        return fitting

    def _bearable(self, seq: Sequence, room: int | None) -> int:
        """The most tokens of a prefill with it: logits and what is recorded have to fit into memory."""
        most = max(MIN_PREFILL_TOKENS, seq.scores.most_tokens) if seq.scores else self.tokens
        if room is None or seq.recording is None:
            return most
        return seq.recording.bearable(seq.fed, most, min(MIN_PREFILL_TOKENS, most), room)

    def put_back(self, seqs: list[Sequence]) -> None:
        """Let requests wait again, before all others."""
        self.waiting.extendleft(reversed(seqs))

    # ---- memory

    def halve_tokens(self, tokens: int) -> bool:
        """Take less than `tokens` in the next prefills; false where that is no use any more."""
        self._good = 0
        if tokens <= MIN_PREFILL_TOKENS:
            return False
        self.tokens = max(MIN_PREFILL_TOKENS, tokens // 2)
        return True

    def limit_sequences(self, seqs: int) -> None:
        """Let no more requests than so many hold a slot for now."""
        self._good = 0
        self.max_sequences = max(1, seqs)

    def went_well(self) -> None:
        """Count a forward; after enough of them limits are loosened."""
        self._good += 1
        if self._good >= RECOVERY_FORWARDS:
            self._good = 0
            self.max_sequences = min(self._most_sequences, 2 * self.max_sequences)
            self.tokens = min(self._most_tokens, 2 * self.tokens)
