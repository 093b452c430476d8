"""The sequences that hold KV slots: those that decode first, then the parked ones."""

from __future__ import annotations

import collections.abc

from deployments.engine.capture.ring import CaptureRing
from deployments.engine.sequence import Sequence
from deployments.model.kv_cache import SlotCache


class Batch:
    """Who holds which slot; keys, values and recorded rows follow when a sequence changes its slot.

    A decode reads slots 0..n-1 as a view, so the sequences that do not decode (prompts that are not all in, sequences
    that wait for what they recorded to be written) stand behind those that do.
    """

    def __init__(self, cache: SlotCache, ring: CaptureRing) -> None:
        self._cache = cache
        self._ring = ring
        self._sequences: list[Sequence] = []  # by slot
        self._decoding = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._sequences

    @property
    def sequences(self) -> collections.abc.Sequence[Sequence]:
        """All sequences, by slot."""
        return self._sequences

    @property
    def decoding(self) -> collections.abc.Sequence[Sequence]:
        """Those that decode, by slot."""
        return self._sequences[: self._decoding]

    @property
    def parked(self) -> collections.abc.Sequence[Sequence]:
        """Those that do not."""
        return self._sequences[self._decoding :]

    def add(self, seq: Sequence) -> None:
        """Give a sequence the next slot, parked."""
        self._sequences.append(seq)

    def settle(self, seq: Sequence) -> None:
        """Put a sequence among those that decode or those that do not, as it says itself."""
        slot = self._sequences.index(seq)
        if seq.decodes and slot >= self._decoding:
            self._swap(slot, self._decoding)
            if seq.recording and seq.recording.wants_generated:
                self._ring.join(self._decoding, seq.recording)
            self._decoding += 1
        elif not seq.decodes and slot < self._decoding:
            self._decoding -= 1
            self._swap(slot, self._decoding)
            self._ring.leave(self._decoding)

    def remove(self, seq: Sequence) -> None:
        """Free a sequence's slot; others move up, so that no gap stays."""
        slot = self._sequences.index(seq)
        if slot < self._decoding:
            self._decoding -= 1
            self._swap(slot, self._decoding)
            slot = self._decoding
        self._swap(slot, len(self._sequences) - 1)
        slot = len(self._sequences) - 1
        self._ring.leave(slot)
        self._cache.clear(slot, seq.written)
        self._sequences.pop()
        seq.fed = seq.written = 0

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        seqs = self._sequences
        self._ring.swap(a, b)
        self._cache.swap(a, b, max(seqs[a].written, seqs[b].written))
        seqs[a], seqs[b] = seqs[b], seqs[a]
