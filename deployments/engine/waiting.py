"""The queue of sequences that wait for admission."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Container, Iterator
from enum import IntEnum
from operator import attrgetter

from deployments.engine.sequence import Sequence


class Lane(IntEnum):
    """What a sequence records: sequences of one lane wait for the same capture memory."""

    PLAIN = 0  # nothing
    SENDING = 1  # rows that leave while it runs
    HOLDING = 2  # rows that it holds until its end

    @classmethod
    def of(cls, seq: Sequence) -> Lane:
        """A sequence's lane."""
        if seq.recording is None:
            return cls.PLAIN
        return cls.HOLDING if seq.recording.reserve else cls.SENDING


class WaitingQueue:
    """Waiting sequences, first come, first served. Each lane can be left without walking through it."""

    def __init__(self) -> None:
        self._lanes: list[deque[Sequence]] = [deque() for _ in Lane]
        self._places = itertools.count(1)

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def __iter__(self) -> Iterator[Sequence]:
        return self.in_order(closed=())

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._lanes[Lane.of(seq)]

    def append(self, seq: Sequence) -> None:
        """Add a sequence behind all others."""
        seq.place = next(self._places)
        self._lanes[Lane.of(seq)].append(seq)

    def appendleft(self, seq: Sequence) -> None:
        """Add a sequence before all others."""
        seq.place = -next(self._places)
        self._lanes[Lane.of(seq)].appendleft(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence.

        Raises:
            ValueError: It does not wait.
        """
        self._lanes[Lane.of(seq)].remove(seq)

    def in_order(self, closed: Container[Lane]) -> Iterator[Sequence]:
        """All sequences; once `closed` has a sequence's lane, those behind it in the lane are left out."""

        def through(lane: Lane) -> Iterator[Sequence]:
            for seq in self._lanes[lane]:
                if lane in closed:
                    return
                yield seq

        return heapq.merge(*map(through, Lane), key=attrgetter("place"))
