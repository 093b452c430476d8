"""Stored rows as training batches, in order or shuffled, split over workers and ranks, for torch's DataLoader."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from deployments.activations.facts import RunInfo
from deployments.activations.reader.row_index import Chosen, index_rows
from deployments.activations.reader.row_reader import Room, RowBatch, RowReader

_PIECE = 256 << 10  # bytes of rows that enter a window together


class ActivationRows(IterableDataset[RowBatch]):
    """Batches of rows, each row once an epoch. Use `DataLoader(rows, batch_size=None)`, or iterate it as it is.

    Shuffled, pieces of consecutive rows (256 KiB) come in random order out of all files and make up windows of
    `window_bytes`, whole batches and at least one. The rows of a window are permuted, and batches cut from them. The
    order follows from the seed, the epoch, and how many workers and ranks there are. Not shuffled, it is that of the
    files, of which each worker has a share. Memory holds a batch and, shuffled, two windows in each worker: one is read
    while the other is used.

    `source`, `points`, `session`, `runs` and `tokens` are as for `index_rows`, as are errors. A batch has `batch_size`
    rows, the last one of each worker perhaps fewer; `drop_last` leaves such out, and all ranks have as many: none,
    where a share is smaller. `rank` is which of `world_size` shares of the rows this process gets; give both, by
    default they are torch.distributed's.
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
        for name, value, least in (("batch_size", batch_size, 1), ("window_bytes", window_bytes, 1), ("seed", seed, 0)):
            if value < least:
                raise ValueError(f"{name}: {value} is less than {least}")
        if rank is None or world_size is None:
            is_distributed = distributed.is_available() and distributed.is_initialized()
            rank, world_size = (distributed.get_rank(), distributed.get_world_size()) if is_distributed else (0, 1)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: {rank} is not one of {world_size}")
        self._rank, self._world_size = rank, world_size
        self._index = index = index_rows(source, points, session=session, runs=runs, tokens=tokens)
        self._reader: RowReader | None = None
        self._rooms: list[Room] = []  # for two windows, which epochs share
        self._batch_size, self._shuffle, self._seed, self._drop_last = batch_size, shuffle, seed, drop_last
        self._window = max(1, window_bytes // index.row_bytes // batch_size) * batch_size  # rows, in whole batches
        self._piece = max(1, _PIECE // index.row_bytes)
        # In shared memory, so that workers which live on from epoch to epoch see it change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def runs(self) -> list[RunInfo]:
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
        return {**self.__dict__, "_reader": None, "_rooms": []}  # each process opens the files for itself

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
                yield reader.take(np.arange(row, min(end, row + self._batch_size)))
        elif first < end:
            yield from self._shuffled(reader, first, end, share)

    def _shuffled(self, reader: RowReader, first: int, end: int, share: int) -> Iterator[RowBatch]:
        """Rows `first` to `end` of what the pieces are in random order, window by window."""
        piece, epoch = self._piece, int(self._epoch)
        generator = np.random.default_rng([self._seed, epoch])  # the same in every share
        whole = self.rows // piece
        order = np.append(generator.permutation(whole), whole)  # the last piece has fewer rows
        shift = generator.integers(self.rows)  # so that these are other ones in each epoch
        within = np.random.default_rng([self._seed, epoch, share + 1])
        rooms, self._rooms = self._rooms or [reader.room(min(self._window, end - first)) for _ in range(2)], []

        def window(row: int) -> RowBatch:
            place = np.arange(row, min(end, row + self._window))
            numbers = (order[place // piece] * piece + place % piece + shift) % self.rows
            return reader.take(np.sort(numbers), rooms[(row - first) // self._window % 2])

        with ThreadPoolExecutor(1, thread_name_prefix="rows") as ahead:  # reads a window while the last one is used
            following = ahead.submit(window, first)
            for row in range(first, end, self._window):
                rows = following.result()
                if row + self._window < end:
                    following = ahead.submit(window, row + self._window)
                drawn = torch.from_numpy(within.permutation(len(rows.run)))
                for batch in range(0, len(drawn), self._batch_size):
                    yield rows.select(drawn[batch : batch + self._batch_size])
        self._rooms = rooms
