"""The rows that hold KV slots: those that decode first, then the parked ones."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.engine.cache import SlotCache
from deployments.engine.recorder import Recorder
from deployments.engine.row import Row


class Batch:
    """Who holds which slot; keys, values and recorded rows follow when a row changes its slot.

    A decode reads slots 0..n-1 as a view, so the rows that do not decode (prompts that are not all in, rows
    that wait for what they recorded to be written) stand behind those that do.
    """

    def __init__(self, cache: SlotCache, recorder: Recorder) -> None:
        self._cache = cache
        self._recorder = recorder
        self._rows: list[Row] = []  # by slot
        self._decoding = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: Row) -> bool:
        return row in self._rows

    @property
    def rows(self) -> Sequence[Row]:
        """All rows, by slot."""
        return self._rows

    @property
    def decoding(self) -> Sequence[Row]:
        """Those that decode, by slot."""
        return self._rows[: self._decoding]

    @property
    def parked(self) -> Sequence[Row]:
        """Those that do not."""
        return self._rows[self._decoding :]

    def add(self, row: Row) -> None:
        """Give a row the next slot, parked."""
        self._rows.append(row)

    def settle(self, row: Row) -> None:
        """Put a row among those that decode or those that do not, as it says itself."""
        slot = self._rows.index(row)
        if row.decodes and slot >= self._decoding:
            self._swap(slot, self._decoding)
            if row.recording and row.recording.wants_generated:
                self._recorder.join(self._decoding, row.recording)
            self._decoding += 1
        elif not row.decodes and slot < self._decoding:
            self._decoding -= 1
            self._swap(slot, self._decoding)
            self._recorder.leave(self._decoding)

    def remove(self, row: Row) -> None:
        """Free a row's slot; others move up, so that no gap stays."""
        slot = self._rows.index(row)
        if slot < self._decoding:
            self._decoding -= 1
            self._swap(slot, self._decoding)
            slot = self._decoding
        self._swap(slot, len(self._rows) - 1)
        slot = len(self._rows) - 1
        self._recorder.leave(slot)
        self._cache.clear(slot, row.written)
        self._rows.pop()
        row.fed = row.written = 0

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        rows = self._rows
        self._recorder.swap(a, b)
        self._cache.swap(a, b, max(rows[a].written, rows[b].written))
        rows[a], rows[b] = rows[b], rows[a]
