"""Scheduling: the queue, the running sequences, and the tokens of each forward pass."""

from __future__ import annotations

import collections.abc
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass

from deployments.engine.capture_budget import CaptureBudget
from deployments.engine.kv_memory import KvMemory, pages_for
from deployments.engine.sequence import Sequence
from deployments.model.batch import PAGE

MIN_PROMPT_TOKENS = 32  # of a forward pass: without memory for these, a request cannot be served
STREAM_PARTS = 5, 16  # while streams decode: one forward pass runs at most and at least 1/n of the prompt tokens
STREAM_ROWS = 3  # prompt tokens for each decoding row, within these limits: a step then takes about two decodes' time
LIGHT = 4  # times as many tokens in all sequences of an owner delay those of another
MOST_OVERTAKING = 64  # later sequences admitted before one that does not fit yet
MOST_BLOCKED = 16  # sequences that do not fit; a step then stops searching
MOST_LOOKUPS = 2  # searches for shared prefixes in one step; each takes time proportional to the prefix's length
RECOVERY_FORWARDS = 64  # successful forward passes after which limits are doubled again


@dataclass(eq=False, slots=True)  # two for each row of every step: made three times as fast as if it were frozen
class Chunk:
    """Consecutive tokens of a sequence in a forward pass.

    Attributes:
        sequence: The sequence.
        start: The position of the first.
        count: The number of tokens.
        row: The first token's row in the forward pass, once chunks are in order.
    """

    sequence: Sequence
    start: int
    count: int
    row: int = 0

    @property
    def decides(self) -> bool:
        """Whether it runs the sequence's last token, which predicts the next."""
        return self.start + self.count >= self.sequence.length  # beyond, its last token is not read yet


class Scheduler:
    """Waiting and running sequences, and the limits of admission.

    Attributes:
        waiting: In the order of arrival, preempted ones first.
        running: Those that hold pages, in the order of admission.
        preempted: How often a sequence lost its pages.
        max_sequences: The most running sequences at present.
        tokens: The most prompt tokens of one forward pass at present; at most a fifth of it while streams decode. Both
            limits are halved when memory runs out, and doubled again later, up to the operator's settings.
    """

    def __init__(
        self,
        memory: KvMemory,
        max_running: int,
        prompt_tokens: int,
        capture_budget: CaptureBudget,
        packs: bool,
        has_states: bool,
        stepwise: bool,
    ) -> None:
        """Initialize without sequences.

        Args:
            memory: The pages of keys and values.
            max_running: The most running sequences.
            prompt_tokens: The most prompt tokens of a forward pass.
            capture_budget: The budget for recorded rows.
            packs: Whether sequences share a forward pass.
            has_states: Whether the model keeps a state of each sequence's last token alone. Prefixes are then not
                shared.
            stepwise: Whether a prompt's later pieces run token by token in the modules that keep it.
        """
        self.waiting = deque[Sequence]()
        self.running: list[Sequence] = []
        self._recording: list[Sequence] = []  # those of the running ones that record
        self._back: dict[Sequence, None] = {}  # waiting sequences that were preempted
        self.preempted = 0
        self.max_sequences = self._most_sequences = min(max_running, memory.slots or max_running)
        self.tokens = self._most_tokens = prompt_tokens
        self._memory = memory
        self._capture_budget = capture_budget
        self._packs, self._has_states, self._stepwise = packs, has_states, stepwise
        self._shares = packs and not has_states
        self._blocked: list[Sequence] = []  # sequences that found too few pages in this step
        self._served = Counter[str | None]()  # by owner: tokens of prompts and answers that have ended
        self._good = 0
        self._turn = 0
        self._suspects: list[dict[Sequence, int]] = []  # groups of failed forward passes, to run separately up to there

    @property
    def recording(self) -> list[Sequence]:
        """Sequences that have or may have recorded rows: running ones and preempted ones."""
        return self._recording + [seq for seq in self._back if seq.recording and seq.recording.bytes]

    # ---- the queue

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. An owner with none waiting starts at the tokens of the least served of those that wait."""
        if not self.waiting and not self.running:
            self._served.clear()
        owner = seq.request.owner
        self._served[owner] += 0
        if len(self._served) > 1 and all(other.request.owner != owner for other in reversed(self.waiting)):
            served = self._tokens_served()
            waiting = {served[other.request.owner] for other in self.waiting}
            start = min(waiting) if waiting else max(served[other.request.owner] for other in self.running)
            self._served[owner] += max(0, start - served[owner])  # a pause gives no right to more later
        self.waiting.append(seq)

    def _tokens_served(self) -> Counter[str | None]:
        """The tokens of each owner's prompts and answers so far, whole prompts from their admission."""
        served = self._served.copy()
        for seq in (*self.running, *self._back):
            served[seq.request.owner] += seq.length
        return served

    def _in_turn(self) -> Iterator[Sequence]:
        """Waiting sequences in the order of admission: preempted ones, then those of the least served owner.

        An owner's own keep their order. This is the virtual token counter of Sheng et al., "Fairness in Serving Large
        Language Models" (OSDI 2024).
        """
        served, queues = self._tokens_served(), defaultdict[str | None, deque[Sequence]](deque)
        for seq in self.waiting:
            if seq in self._back:
                yield seq
            else:
                queues[seq.request.owner].append(seq)
        turns = [(served[owner], queue[0].arrival, owner) for owner, queue in queues.items()]
        heapq.heapify(turns)
        while turns:
            tokens, _, owner = turns[0]
            seq = queues[owner].popleft()
            if queues[owner]:
                heapq.heapreplace(turns, (tokens + seq.length, queues[owner][0].arrival, owner))
            else:
                heapq.heappop(turns)
            yield seq

    # ---- the next forward pass

    def next_chunks(self) -> list[Chunk]:
        """The next token of each decoding sequence, and chunks of prompts."""
        if self._memory.slides:
            for seq in self.running:
                self._memory.slide(seq.kv, seq.fed)
        if self._has_states:
            for seq in [seq for seq in self.running if seq.kv.state_at != seq.fed]:
                self.preempt(seq)  # a failed forward pass has changed its states
        decoding = self._decoding()
        chunks = [Chunk(seq, seq.fed, 1) for seq in decoding]
        if self.waiting or len(decoding) < len(self.running):
            chunks += self._prompts(self._beside(decoding))
        while not chunks and (stuck := [seq for seq in self.running if not seq.stalled]):
            if len(stuck) == 1:
                break
            self.preempt(max(stuck, key=lambda seq: seq.arrival))  # none has pages for its next tokens
            chunks = self._prompts(self.tokens)
        if group := self._suspected():
            chunks = [chunk for chunk in chunks if chunk.sequence in group] or chunks
        if any(chunk.sequence.inside for chunk in chunks):
            chunks = self._separated(chunks)
        if not self._packs:
            chunks = sorted(chunks, key=lambda chunk: chunk.sequence.turn)[:1]
            self._turn += 1
            for chunk in chunks:
                chunk.sequence.turn = self._turn
        return chunks

    def _separated(self, chunks: list[Chunk]) -> list[Chunk]:
        """Either all decodes or one prompt, in turns."""
        decodes = [chunk for chunk in chunks if chunk.sequence.decodes]
        self._turn += 1
        prompts = chunks[len(decodes) :][:1]
        for chunk in prompts if self._stepwise else ():
            chunk.count = 1 if chunk.start else chunk.count
        return decodes if decodes and (self._turn % 2 or not prompts) else prompts

    def may_run_ahead(self, chunks: collections.abc.Sequence[Chunk]) -> bool:
        """Whether all running sequences are those of a decode step, and have pages for the next one."""
        seqs = [chunk.sequence for chunk in chunks]
        if len(seqs) != len(self.running) or any(seq.done or seq.ending or seq.stalled for seq in seqs):
            return False
        for chunk in chunks:  # this step may have to run again, so its window stays
            self._memory.slide(chunk.sequence.kv, chunk.start)
        return all(self._memory.grow(chunk.sequence.kv, chunk.start + 2) for chunk in chunks)

    def suspect(self, chunks: collections.abc.Sequence[Chunk]) -> None:
        """Run the sequences of a failed forward pass in two halves next, to find the one at fault.

        With states, a sequence first runs again from its start; only its next decode shows whether it fails.
        """
        until = {chunk.sequence: chunk.start + chunk.count + self._has_states for chunk in chunks}
        seqs = list(until)
        for half in (seqs[len(seqs) // 2 :], seqs[: len(seqs) // 2]):
            self._suspects.append({seq: until[seq] for seq in half})

    def _suspected(self) -> dict[Sequence, int]:
        """The group of suspects that runs now; empty if there is none."""
        while self._suspects:
            if any(not seq.done and seq.fed < until for seq, until in self._suspects[-1].items()):
                return self._suspects[-1]
            self._suspects.pop()
        return {}

    def _decoding(self) -> list[Sequence]:
        """Decoding sequences, each with a page for its next token; while a page is missing, preempt the youngest."""
        decoding = [seq for seq in self.running if seq.decodes]
        growing = [seq for seq in decoding if seq.fed >= PAGE * len(seq.kv.pages)]
        for seq in sorted(growing, key=lambda seq: seq.arrival):
            while seq in self.running and not self._memory.grow(seq.kv, seq.fed + 1):
                self.preempt(max(self.running, key=lambda other: other.arrival))
        return [seq for seq in self.running if seq.decodes] if growing else decoding

    def _beside(self, decoding: list[Sequence]) -> int:
        """The most prompt tokens beside decoding sequences: few beside streams, fewer beside those of a light owner."""
        is_light = len(self._served) > 1 and self._has_light_owner(decoding)
        if not is_light and not any(seq.request.streamed for seq in decoding):
            return self.tokens
        most, least = (self.tokens // part for part in STREAM_PARTS)
        return max(MIN_PROMPT_TOKENS, least // 2 if is_light else least, min(most, STREAM_ROWS * len(decoding)))

    def _has_light_owner(self, decoding: list[Sequence]) -> bool:
        """Whether an owner of these has a small part of the tokens of another owner."""
        tokens = Counter[str | None]()
        for seq in (*self.running, *self.waiting):
            tokens[seq.request.owner] += seq.length
        return any(LIGHT * tokens[seq.request.owner] < max(tokens.values()) for seq in decoding)

    def _prompts(self, left: int) -> list[Chunk]:
        """Chunks of running prompts, then of waiting ones, as far as they fit, of at most `left` tokens together."""
        room = self._capture_budget.left(self.recording)
        scored = 0
        coming = set[Hashable]()  # pages that this forward pass fills and that others may share in the next
        chunks: list[Chunk] = []
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
                most = max(1, left // 2)  # a long prompt does not block short ones
            if seq.scores:  # its logits must fit into memory, too
                most = min(most, max(MIN_PROMPT_TOKENS, seq.scores.most_tokens) - scored)
            if room is not None and seq.recording:
                first = not chunks
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
            chunks.append(Chunk(seq, seq.fed, count))
            if self._shares:
                coming.add(self._memory.next_page(seq.kv, seq.token_ids, min(seq.fed + count, seq.unchanged)))
        return chunks

    def _fitting(self) -> list[Sequence]:
        """Waiting sequences that can be admitted, given the free pages and capture memory."""
        fitting: list[Sequence] = []
        self._blocked = []
        if not self.waiting or len(self.running) >= self.max_sequences:
            return fitting
        # Running sequences will need these, too.
        promised = sum(max(0, self._most_pages(seq) - len(seq.kv.pages) + seq.kv.passed) for seq in self.running)
        reserved = self._capture_budget.reserved(self.running)
        lookups = 0
        closed = set[bool]()  # whether those that keep their rows until the end, or the others, wait for capture memory
        for seq in self._in_turn() if len(self._served) > 1 else self.waiting:
            if seq.recording is not None:
                keeps = seq.recording.reserve > 0
                if keeps in closed or not self._capture_budget.admits(seq, reserved):
                    closed.add(keeps)
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
                    break  # released pages go to this sequence first
                self._blocked.append(seq)
                continue
            promised += pages
            seq.overtakes = len(self._blocked)
            fitting.append(seq)
            reserved += seq.recording.reserve if seq.recording else 0
        return fitting

    def _most_pages(self, seq: Sequence) -> int:
        """The most pages that a sequence needs at once to be admitted."""
        return pages_for(self._memory.most_held(seq.need, max(1, min(self.tokens, seq.length - seq.fed))))

    def _admitted(self, seq: Sequence, coming: Container[Hashable]) -> bool:
        """Admit a sequence with the known pages of its prefix, if it can start.

        It waits for pages in `coming`, which others fill in this forward pass, if it can share one of these.
        """
        tokens, shared = seq.token_ids, 0
        if self._shares:
            shared = self._memory.share(seq.kv, tokens, seq.unshared, seq.request.owner)
            self._memory.slide(seq.kv, shared)
        following = self._memory.next_page(seq.kv, tokens, seq.unshared)
        if (following is not None and following in coming) or not self._memory.grow(seq.kv, shared + 1):
            self._memory.release(seq.kv)
            return False
        seq.fed = shared
        if seq not in self._back:  # a preempted sequence's own earlier work is not counted
            seq.cached = shared
        if seq.recording:
            seq.recording.rows = max(seq.recording.rows, shared)
        for other in self._blocked[: seq.overtakes]:
            other.overtaken += 1
        self.waiting.remove(seq)
        self._back.pop(seq, None)
        self.running.append(seq)
        if seq.recording:
            self._recording.append(seq)
        return True

    # ---- leaving

    def preempt(self, seq: Sequence) -> None:
        """Release a sequence's pages; it keeps its tokens and recorded rows, and runs again from the start."""
        self._take_out(seq)
        seq.stalled = False
        self.waiting.appendleft(seq)
        self._back[seq] = None
        self.preempted += 1

    def remove(self, seq: Sequence) -> None:
        """Release a sequence's pages, or remove it from the queue."""
        if seq in self.running or seq in self._back:
            self._served[seq.request.owner] += seq.length
        self._take_out(seq)

    def _take_out(self, seq: Sequence) -> None:
        self._back.pop(seq, None)
        if seq in self.running:
            self.running.remove(seq)
            if seq.recording:
                self._recording.remove(seq)
            self._memory.release(seq.kv)
            seq.fed = 0
        elif seq in self.waiting:
            self.waiting.remove(seq)

    # ---- memory

    def halve_tokens(self, tokens: int) -> bool:
        """Run fewer than `tokens` prompt tokens in the next forward passes; false if that is no longer possible."""
        self._good = 0
        if tokens <= MIN_PROMPT_TOKENS:
            return False
        self.tokens = max(MIN_PROMPT_TOKENS, tokens // 2)
        return True

    def limit_sequences(self, seqs: int) -> None:
        """Limit the running sequences for now."""
        self._good = 0
        self.max_sequences = max(1, seqs)

    def went_well(self) -> None:
        """Count a successful forward pass; after enough of them, loosen the limits."""
        self._good += 1
        if self._good >= RECOVERY_FORWARDS:
            self._good = 0
            self.max_sequences = min(self._most_sequences, 2 * self.max_sequences)
            self.tokens = min(self._most_tokens, 2 * self.tokens)
