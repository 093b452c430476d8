"""Which tokens run next: the queue, the sequences under way, and what one forward takes of them."""

from __future__ import annotations

import collections.abc
from collections import deque
from collections.abc import Container, Hashable
from dataclasses import dataclass

from deployments.engine.capture_budget import CaptureBudget
from deployments.engine.kv_memory import KvMemory, pages_for
from deployments.engine.sequence import Sequence
from deployments.model.kv_cache import PAGE

MIN_PROMPT_TOKENS = 32  # of a forward: with no memory for these, a request cannot be served
STREAM_PARTS = 5, 16  # while streams decode, so many of a forward's prompt tokens at most, and so many at least
STREAM_ROWS = 3  # of prompts for each row that decodes, between these: a step then takes some two decodes' time
MOST_OVERTAKING = 64  # later sequences that are taken in before one that does not fit yet
MOST_BLOCKED = 16  # that do not fit: a step looks at no others after them
MOST_LOOKUPS = 2  # of beginnings whose pages others hold, in one step: each takes time in proportion to its length
RECOVERY_FORWARDS = 64  # forwards without a failure after which limits are doubled again


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens that a sequence has in a forward.

    Attributes:
        sequence: The sequence.
        start: The position of the first.
        count: How many.
        row: The forward's row of the first, once pieces are in order.
    """

    sequence: Sequence
    start: int
    count: int
    row: int = 0

    @property
    def decides(self) -> bool:
        """Whether it runs the sequence's last token, after which the next is drawn."""
        return self.start + self.count == self.sequence.length


class Scheduler:
    """Sequences that wait and those under way, and the limits under which they are taken in.

    Attributes:
        waiting: First come, first served.
        running: Those that hold pages, in the order in which they were taken in.
        preempted: How often a sequence lost its pages.
        max_sequences: The most sequences that may be under way at present.
        tokens: The most prompt tokens of one forward at present; at most a fifth of it while streams decode. Both are
            halved when memory runs out, and doubled again, up to what the operator set, while it does not.
    """

    def __init__(
        self, memory: KvMemory, max_running: int, prompt_tokens: int, capture_budget: CaptureBudget, packs: bool
    ) -> None:
        """Initialize with no sequences.

        Args:
            memory: Where keys and values go.
            max_running: The most sequences under way.
            prompt_tokens: The most prompt tokens of a forward.
            capture_budget: What may be recorded.
            packs: Whether sequences share a forward.
        """
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._back: dict[Sequence, None] = {}  # of those that wait, who were under way before
        self.preempted = 0
        self.max_sequences = self._most_sequences = max_running
        self.tokens = self._most_tokens = prompt_tokens
        self._memory = memory
        self._capture_budget = capture_budget
        self._packs = packs
        self._blocked: list[Sequence] = []  # those that found too few pages when this step looked
        self._good = 0
        self._turn = 0
        self._suspects: list[list[Sequence]] = []  # groups of a forward that failed, each to run by itself

    @property
    def recording(self) -> list[Sequence]:
        """Those that hold recorded rows, or may: they are under way, or were."""
        back = [seq for seq in self._back if seq.recording and seq.recording.bytes]
        return [seq for seq in self.running if seq.recording] + back

    # ---- what runs next

    def next_pieces(self) -> list[Piece]:
        """The next token of each sequence that decodes, and beside them pieces of prompts."""
        for seq in self.running:
            self._memory.slide(seq.kv, seq.fed)
        decoding = self._decoding()
        pieces = [Piece(seq, seq.fed, 1) for seq in decoding]
        streams = any(seq.request.streamed for seq in decoding)
        pieces += self._prompts(self._beside_streams(len(decoding)) if streams else self.tokens)
        while not pieces and (stuck := [seq for seq in self.running if not seq.stalled]):
            if len(stuck) == 1:
                break
            self.preempt(max(stuck, key=lambda seq: seq.arrival))  # none has room for its next tokens
            pieces = self._prompts(self.tokens)
        if not self._packs:
            pieces = sorted(pieces, key=lambda piece: piece.sequence.turn)[:1]
        if self._suspects:
            group = self._suspects.pop()
            pieces = [piece for piece in pieces if piece.sequence in group] or pieces
        self._turn += 1
        for piece in pieces:
            piece.sequence.turn = self._turn
        return pieces

    def suspect(self, pieces: collections.abc.Sequence[Piece]) -> None:
        """Run the sequences of a forward that failed in two halves next: one of them may be at fault."""
        seqs = [piece.sequence for piece in pieces]
        self._suspects += [seqs[len(seqs) // 2 :], seqs[: len(seqs) // 2]]

    def _decoding(self) -> list[Sequence]:
        """Those that decode, with room for their next token; while there is none, the youngest waits again."""
        for seq in sorted((seq for seq in self.running if seq.decodes), key=lambda seq: seq.arrival):
            while seq in self.running and not self._memory.grow(seq.kv, seq.fed + 1):
                self.preempt(max(self.running, key=lambda other: other.arrival))
        return [seq for seq in self.running if seq.decodes]

    def _beside_streams(self, rows: int) -> int:
        """The most prompt tokens beside so many decodes: somebody sees how long these stand still meanwhile."""
        most, least = (self.tokens // part for part in STREAM_PARTS)
        return max(MIN_PROMPT_TOKENS, least, min(most, STREAM_ROWS * rows))

    def _prompts(self, left: int) -> list[Piece]:
        """Pieces of prompts that are under way, then of those that wait, as far as they fit.

        Args:
            left: The most tokens of all pieces.
        """
        room = self._capture_budget.left(self.recording)
        scored = 0
        coming = set[Hashable]()  # pages that this forward will fill, and that others may share in the next
        pieces: list[Piece] = []
        begun = [seq for seq in self.running if not seq.decodes and not seq.stalled and seq.fed < seq.length]
        candidates = [*begun, *self._fitting()]
        lengths = [seq.length - seq.fed for seq in candidates]
        for i, seq in enumerate(candidates):
            if left <= 0:
                break
            if i >= len(begun) and not self._admitted(seq, coming):
                continue
            most = left
            if seq.length - seq.fed > left and min(lengths[i + 1 :], default=left) <= left // 2:
                most = max(1, left // 2)  # a long prompt stops no short one
            if seq.scores:  # its logits have to fit into memory, too
                most = min(most, max(MIN_PROMPT_TOKENS, seq.scores.most_tokens) - scored)
            if room is not None and seq.recording:
                first = not pieces
                fits = seq.recording.bearable(seq.fed, most, min(MIN_PROMPT_TOKENS, most) if first else 0, room)
                most = min(most, fits if first or seq.recording.size(seq.fed, 1) <= room else 0)
            count = min(seq.length - seq.fed, most)
            while count > 0 and not self._memory.grow(seq.kv, seq.fed + count):
                count //= 2
            if count <= 0:
                continue
            left -= count
            scored += count if seq.scores else 0
            if room is not None and seq.recording:
                room = max(0, room - seq.recording.size(seq.fed, count))
            pieces.append(Piece(seq, seq.fed, count))
            if self._packs:
                coming.add(self._memory.next_page(seq.kv, seq.token_ids, min(seq.fed + count, seq.unchanged)))
        return pieces

    def _fitting(self) -> list[Sequence]:
        """Those that wait and may come in, first come, first served, where there are pages and capture memory."""
        fitting: list[Sequence] = []
        # Those under way will want these, too.
        promised = sum(max(0, self._most_pages(seq) - len(seq.kv.pages) + seq.kv.passed) for seq in self.running)
        reserved = self._capture_budget.reserved(self.running)
        self._blocked = []
        lookups = 0
        turn = True  # of who holds rows until its end: none overtakes another
        for seq in self.waiting:
            reserve = seq.recording.reserve if seq.recording else 0
            if (reserve and not turn) or not self._capture_budget.admits(seq, reserved):
                turn = turn and not reserve
                continue
            count = len(self.running) + len(fitting)
            if count >= self.max_sequences:
                break
            pages, unheld = self._most_pages(seq), pages_for(seq.need)
            left = self._memory.available - promised
            if count and unheld - seq.unshared // PAGE <= left < pages and lookups < MOST_LOOKUPS:
                unheld -= self._memory.held(seq.token_ids, seq.unshared, seq.request.owner)
                pages = min(pages, unheld)
                lookups += 1
            if count and pages > left:
                if seq.overtaken >= MOST_OVERTAKING or len(self._blocked) >= MOST_BLOCKED:
                    break  # what others give back is for this one
                self._blocked.append(seq)
                continue
            promised += pages
            fitting.append(seq)
            reserved += reserve
        return fitting

    def _most_pages(self, seq: Sequence) -> int:
        """The most pages that a sequence needs at once for the positions that it must find."""
        return pages_for(self._memory.most_held(seq.need, max(1, min(self.tokens, seq.length - seq.fed))))

    def _admitted(self, seq: Sequence, coming: Container[Hashable]) -> bool:
        """Take a sequence in, with the pages that are known of its beginning.

        Args:
            seq: The sequence.
            coming: Pages that others fill in this forward: who could share one waits for it.

        Returns:
            Whether it was taken in; else it waits on.
        """
        tokens, shared = seq.token_ids, 0
        if self._packs:
            shared = self._memory.share(seq.kv, tokens, seq.unshared, seq.request.owner)
            self._memory.slide(seq.kv, shared)
        following = self._memory.next_page(seq.kv, tokens, seq.unshared)
        if (following is not None and following in coming) or not self._memory.grow(seq.kv, shared + 1):
            self._memory.release(seq.kv)
            return False
        seq.fed = shared
        if seq not in self._back:  # what it ran itself before it lost its pages counts for nothing
            seq.cached = shared
        if seq.recording:
            seq.recording.rows = max(seq.recording.rows, shared)
        for other in self._blocked:
            other.overtaken += other.arrival < seq.arrival
        self.waiting.remove(seq)
        self._back.pop(seq, None)
        self.running.append(seq)
        return True

    # ---- who leaves

    def preempt(self, seq: Sequence) -> None:
        """Take a sequence's pages; its tokens and what it recorded stay, and it is run again from its beginning."""
        self.remove(seq)
        seq.stalled = False
        self.waiting.appendleft(seq)
        self._back[seq] = None
        self.preempted += 1

    def remove(self, seq: Sequence) -> None:
        """Free what a sequence holds, or its place in the queue."""
        self._back.pop(seq, None)
        if seq in self.running:
            self.running.remove(seq)
            self._memory.release(seq.kv)
            seq.fed = 0
        elif seq in self.waiting:
            self.waiting.remove(seq)

    # ---- memory

    def halve_tokens(self, tokens: int) -> bool:
        """Take less than `tokens` of prompts in the next forwards; false where that is no use any more."""
        self._good = 0
        if tokens <= MIN_PROMPT_TOKENS:
            return False
        self.tokens = max(MIN_PROMPT_TOKENS, tokens // 2)
        return True

    def limit_sequences(self, seqs: int) -> None:
        """Let no more sequences than so many be under way for now."""
        self._good = 0
        self.max_sequences = max(1, seqs)

    def went_well(self) -> None:
        """Count a forward; after enough of them limits are loosened."""
        self._good += 1
        if self._good >= RECOVERY_FORWARDS:
            self._good = 0
            self.max_sequences = min(self._most_sequences, 2 * self.max_sequences)
            self.tokens = min(self._most_tokens, 2 * self.tokens)
