"""A file as parts of known sizes that are read when they are asked for, so that any range of it can be made alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

Buffer = bytes | memoryview


class Part(NamedTuple):
    """Some bytes of a file.

    Attributes:
        size: How many there are.
        read: Those from `first` to `end`, in order: `read(first, end)`.
    """

    size: int
    read: Callable[[int, int], Iterable[Buffer]]

    @classmethod
    def known(cls, data: Buffer) -> Part:
        """Bytes that are in memory."""
        return cls(len(data), lambda first, end: [data[first:end]])

    @classmethod
    def made(cls, size: int, make: Callable[[], bytes]) -> Part:
        """A few bytes that are made when they are asked for."""
        return cls(size, lambda first, end: [make()[first:end]])


class Parts:
    """Parts, one behind the other.

    Attributes:
        length: Bytes of all.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        """Nothing is read yet."""
        self._parts = list(parts)
        self._ends = list(accumulate(part.size for part in self._parts))
        self.length = self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        """How many parts there are."""
        return len(self._parts)

    def read(self, first: int = 0, end: int | None = None) -> Iterator[Buffer]:
        """The bytes from `first` to `end`, or all of them; no other part is read."""
        end = self.length if end is None else min(end, self.length)
        for number in range(bisect_right(self._ends, first), len(self._parts)):
            part = self._parts[number]
            begins = self._ends[number] - part.size
            if begins >= end:
                return
            yield from part.read(max(first - begins, 0), min(end - begins, part.size))
