"""Reads batches of stored rows with one copy, from mapped files."""

from __future__ import annotations

import os
from operator import getitem
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from deployments.activations.reader.row_index import RowIndex


class RowBatch(NamedTuple):
    """Some rows, each with the same index in every field."""

    points: dict[str, torch.Tensor]  # by name `[rows, ...features]`, in the dtype that was stored
    token_id: torch.Tensor  # int32 `[rows]`
    position: torch.Tensor  # index in prompt + generated, int32 `[rows]`
    generated: torch.Tensor  # whether the token was generated; else it is the prompt's, bool `[rows]`
    run: torch.Tensor  # the run, an index of `runs` of what the batch is of, int64 `[rows]`


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

    def take(self, numbers: np.ndarray) -> RowBatch:
        """Rows by their numbers, int64 `[rows]`, in memory of their own."""
        index = self._index
        block, of, skipped, rows = self._pieces(numbers)
        maps, points = [self._files[file] for file in index.file[of].tolist()], dict[str, torch.Tensor]()
        for (name, column), offsets in zip(index.columns.items(), index.offsets, strict=True):
            begins = offsets[of] + skipped * column.width
            ends = begins + rows * column.width
            # Copies many small pieces without a step of the interpreter for each.
            memory = bytearray().join(map(getitem, maps, map(slice, begins.tolist(), ends.tolist())))
            values = torch.frombuffer(memory, dtype=column.dtype) if memory else torch.empty(0, dtype=column.dtype)
            points[name] = values.view(len(numbers), *column.shape)
        token_id, position = points.pop("token_id"), points.pop("position")
        generated, run = torch.from_numpy(index.generated[block]), torch.from_numpy(index.run[block])
        return RowBatch(points, token_id, position, generated, run)

    def read_ahead(self, numbers: np.ndarray) -> None:
        """Ask the system to have rows in its cache soon, int64 `[rows]`, ascending."""
        _, of, skipped, rows = self._pieces(numbers)
        files = self._index.file[of]
        for number in np.unique(files):
            file = os.open(self._index.paths[number], os.O_RDONLY)
            here = files == number
            for column, offsets in zip(self._index.columns.values(), self._index.offsets, strict=True):
                begins = offsets[of[here]] + skipped[here] * column.width
                for begin, size in zip(begins.tolist(), (rows[here] * column.width).tolist(), strict=True):
                    os.posix_fadvise(file, begin, size, os.POSIX_FADV_WILLNEED)
            os.close(file)

    def _pieces(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Each row's block `[rows]`; and pieces of rows that lie one after the other, `[pieces]` each.

        Of a piece: its block, how many rows of the block are before it, and how many rows it has.
        """
        block = self._index.starts.searchsorted(numbers, side="right") - 1
        is_next = (np.diff(numbers) == 1) & (np.diff(block) == 0)
        firsts = np.flatnonzero(np.concatenate([[True], ~is_next]))[: len(numbers)]
        of = block[firsts]
        return block, of, numbers[firsts] - self._index.starts[of], np.diff(firsts, append=len(numbers))


def _map(path: Path, least: int) -> memoryview:
    """A file's bytes; without a descriptor, of which a process may have fewer than a store has files."""
    size = path.stat().st_size
    if size < least:
        raise ValueError(f"{path} is shorter than when it was indexed: index the store again")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy().data
