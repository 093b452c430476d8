"""Reads batches of stored rows with one copy, from mapped files."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from deployments.activations.reader.row_index import RowIndex

_LINE = 64  # bytes of a cache line
Room = list[np.ndarray]  # bytes for the columns of a batch


class RowBatch(NamedTuple):
    """Some rows, each with the same index in every field."""

    points: dict[str, torch.Tensor]  # by name `[rows, ...features]`, in the dtype that was stored
    token_id: torch.Tensor  # int32 `[rows]`
    position: torch.Tensor  # index in prompt + generated, int32 `[rows]`
    generated: torch.Tensor  # whether the token was generated; else it is the prompt's, bool `[rows]`
    run: torch.Tensor  # the run, an index of `runs` of what the batch is of, int64 `[rows]`

    def select(self, rows: torch.Tensor) -> RowBatch:
        """A copy of some of the rows, by their places here, int64 `[rows]`."""
        points = {name: value.index_select(0, rows) for name, value in self.points.items()}
        return RowBatch(points, *(value.index_select(0, rows) for value in self[1:]))


class RowReader:
    """Reads rows by their numbers; maps the files once, for as long as it lives.

    FileNotFoundError if a file is gone, ValueError if one has become shorter.
    """

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        widths = np.array([column.width for column in index.columns.values()])
        ends = index.offsets + widths[:, None] * np.diff(index.starts)  # of each column's values in a block
        self._files = [
            _map(path, int(ends[:, index.file == number].max(initial=0))) for number, path in enumerate(index.paths)
        ]

    def take(self, numbers: np.ndarray, room: Room | None = None) -> RowBatch:
        """Rows by their numbers, int64 `[rows]`; those that lie one after the other are copied at once.

        They are written to `room`, by default to memory of their own.
        """
        index = self._index
        block = index.starts.searchsorted(numbers, side="right") - 1
        is_next = (np.diff(numbers) == 1) & (np.diff(block) == 0)
        firsts = np.flatnonzero(np.concatenate([[True], ~is_next]))[: len(numbers)]
        of, rows = block[firsts], np.diff(firsts, append=len(numbers))
        files, skipped = index.file[of].tolist(), numbers[firsts] - index.starts[of]
        points = dict[str, torch.Tensor]()
        values = zip(index.columns.items(), index.offsets, room or self.room(len(numbers)), strict=True)
        for (name, column), offsets, memory in values:
            begins, sizes, to = (offsets[of] + skipped * column.width).tolist(), (rows * column.width).tolist(), 0
            for file, begin, size in zip(files, begins, sizes, strict=True):
                memory[to : to + size] = self._files[file][begin : begin + size]
                to += size
            points[name] = torch.from_numpy(memory[:to]).view(column.dtype).view(len(numbers), *column.shape)
        token_id, position = points.pop("token_id"), points.pop("position")
        generated, run = torch.from_numpy(index.generated[block]), torch.from_numpy(index.run[block])
        return RowBatch(points, token_id, position, generated, run)

    def room(self, rows: int) -> Room:
        """Memory for rows, of each column: in one piece, which the allocator reuses."""
        sizes = [-(-rows * column.width // _LINE) * _LINE for column in self._index.columns.values()]
        memory = np.empty(sum(sizes), np.uint8)  # on large pages, which torch does not ask for
        return [memory[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _map(path: Path, least: int) -> np.ndarray:
    """A file's bytes, uint8; without a descriptor, of which a process may have fewer than a store has files."""
    size = path.stat().st_size
    if size < least:
        raise ValueError(f"{path} is shorter than when it was indexed: index the store again")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
