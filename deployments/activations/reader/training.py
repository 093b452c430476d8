"""Stored rows as training batches, in order or shuffled, split over workers and ranks, for torch's DataLoader."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from deployments.activations.facts import RunFacts
from deployments.activations.reader.row_index import Chosen, index_rows
from deployments.activations.reader.row_reader import RowBatch, RowReader

_PIECE = 256 << 10  # bytes of rows that enter a window together


class ActivationRows(IterableDataset[RowBatch]):
    """Batches of rows, each row once an epoch. Use `DataLoader(rows, batch_size=None)`, or iterate it as it is.

    Shuffled, pieces of a run's rows (256 KiB) come in random order out of all files and make up windows of
    `window_bytes`. The rows of a window are permuted, and batches cut from them; what is left goes into the next. The
    order follows from the seed, the epoch, and how many workers and ranks there are. Not shuffled, it is that of the
    files, of which each worker has a share. Memory holds a batch, and 8 bytes for each row of a window: the window
    itself stays in its files.

    `source`, `points`, `session`, `runs` and `tokens` are as for `index_rows`, as are errors. A batch has `batch_size`
    rows, the last one of each worker perhaps fewer; `drop_last` leaves such out, and all ranks have as many: none,
    where a share is smaller. `rank` is which of `world_size` shares of the rows this process gets, by default as
    torch.distributed says.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        points: Sequence[str],
        *,
        batch_size: int,
        session: str | None = None,
        runs: Collection[str] | None = None,
        tokens: Chosen = "all",
        shuffle: bool = True,
        seed: int = 0,
        window_bytes: int = 256 << 20,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        for name, value in {"batch_size": batch_size, "window_bytes": window_bytes}.items():
            if value < 1:
                raise ValueError(f"{name}: {value} is less than 1")
        if seed < 0:
            raise ValueError(f"seed: {seed} is less than 0")
        self._rank, self._world_size = _place(rank, world_size)
        index = index_rows(source, points, session=session, runs=runs, tokens=tokens)
        self._index = index
        self._reader: RowReader | None = None
        self._batch_size, self._shuffle, self._seed, self._drop_last = batch_size, shuffle, seed, drop_last
        self._window = max(1, window_bytes // index.row_bytes)
        self._piece = max(1, _PIECE // index.row_bytes)
        # In shared memory, so that workers which live on from epoch to epoch see it change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def runs(self) -> list[RunFacts]:
        """What the runs are that `RowBatch.run` counts."""
        return self._index.runs

    def shape(self, point: str) -> tuple[int, ...]:
        """The shape of a row's value at a point."""
        return self._index.columns[point].shape

    @property
    def rows(self) -> int:
        """Rows of an epoch, of all ranks together."""
        return len(self._index)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; without it every epoch has the same."""
        self._epoch.fill_(epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}  # each process opens the files for itself

    def __iter__(self) -> Iterator[RowBatch]:
        reader = self._reader = self._reader or RowReader(self._index)
        worker = get_worker_info()
        workers = worker.num_workers if worker else 1
        share, shares = self._rank * workers + (worker.id if worker else 0), self._world_size * workers
        first, end = (self.rows * which // shares for which in (share, share + 1))
        if self._drop_last:
            end = first + self.rows // shares // self._batch_size * self._batch_size
        if not self._shuffle:
            for row in range(first, end, self._batch_size):
                yield reader.between(row, min(end, row + self._batch_size))
            return
        for rows in self._shuffled(first, end, share):
            yield reader.take(rows)

    def _shuffled(self, first: int, end: int, share: int) -> Iterator[np.ndarray]:
        """The numbers of rows `first` to `end` once the pieces are in random order, batch by batch."""
        begin, count = _pieces(self._index.starts, self._piece)
        epoch = int(self._epoch)
        order = np.random.default_rng([self._seed, epoch]).permutation(len(begin))  # the same in every share
        begin, count = _cut(begin[order], count[order], first, end)
        within = np.random.default_rng([self._seed, epoch, share + 1])
        ends, at, held = np.cumsum(count), 0, np.empty(0, dtype=np.int64)
        while at < len(ends):
            filled = (ends[at - 1] if at else 0) + self._window
            until = max(at + 1, int(np.searchsorted(ends, filled, side="right")))
            held = np.concatenate([held, _spread(begin[at:until], count[at:until])])
            within.shuffle(held)
            at = until
            full = len(held) if at == len(ends) else len(held) // self._batch_size * self._batch_size
            for row in range(0, full, self._batch_size):
                yield held[row : min(full, row + self._batch_size)]
            held = held[full:]


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError("rank, world_size: give both or neither")
    if rank is None or world_size is None:
        there = distributed.is_available() and distributed.is_initialized()
        return (distributed.get_rank(), distributed.get_world_size()) if there else (0, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: {rank} is not one of {world_size}")
    return rank, world_size


def _pieces(starts: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """All blocks in pieces of up to `most` rows: each one's first row, and how many it has."""
    rows = np.diff(starts)
    each = -(-rows // most)
    before = _spread(np.zeros_like(each), each) * most  # rows of its block before a piece
    return np.repeat(starts[:-1], each) + before, np.minimum(most, np.repeat(rows, each) - before)


def _cut(begin: np.ndarray, count: np.ndarray, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Of pieces one after the other, what stands between two places."""
    ends = np.cumsum(count)
    low, high = np.maximum(ends - count, first), np.minimum(ends, end)
    kept = low < high
    return (begin + low - (ends - count))[kept], (high - low)[kept]


def _spread(begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`begin[i]` to `begin[i] + count[i]` for each i, one after the other."""
    ends = np.cumsum(count)
    return np.repeat(begin - (ends - count), count) + np.arange(ends[-1] if len(ends) else 0)
