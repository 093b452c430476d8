"""Batches of stored rows, copied once: from the map of their files into the batch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from deployments.activations.row_index import IDS, Column, RowIndex, blocks_between

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowBatch(NamedTuple):
    """Some rows, each with the same index in every field.

    Attributes:
        points: Point name to `[rows, ...features]`, in the dtype that was stored.
        token_id: Each row's token, int32 `[rows]`.
        position: Its index in prompt + generated, int32 `[rows]`.
        generated: Whether it was generated; else it is the prompt's, bool `[rows]`.
        run: Its run, an index of `runs` of what the batch is of, int64 `[rows]`.
    """

    points: dict[str, torch.Tensor]
    token_id: torch.Tensor
    position: torch.Tensor
    generated: torch.Tensor
    run: torch.Tensor


class _Lying(NamedTuple):
    """A column in memory: rows begin at multiples of `unit` bytes, and row 0 of each block at `first` of them."""

    column: Column
    first: np.ndarray
    step: int
    rows: torch.Tensor


class RowReader:
    """Reads rows by their numbers; maps the files once, for as long as it lives.

    The maps' pages are the operating system's cache of the files, and go when memory is short.

    Args:
        index: Where the rows lie.

    Raises:
        FileNotFoundError: A file is gone.
        ValueError: One is shorter than it was when it was indexed.
    """

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._maps = [_map(path, _least(index, number)) for number, path in enumerate(index.paths)]
        places = np.array([each.ctypes.data for each in self._maps])
        low, high = int(places.min()), max(each.ctypes.data + each.size for each in self._maps)
        # One tensor over all of the maps, and what lies between, which no row names: so that rows out of
        # several files are gathered at once, straight into their places.
        self._memory = torch.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), dtype=torch.uint8)
        begins = index.offsets + (places - low)[index.file]
        self._columns = {
            name: _lying(self._memory, column, begins[i]) for i, (name, column) in enumerate(index.columns.items())
        }

    def take(self, rows: np.ndarray) -> RowBatch:
        """Rows by their numbers, int64 `[rows]`, in that order."""
        block = np.searchsorted(self._index.starts, rows, side="right") - 1
        within = rows - self._index.starts[block]
        values = {
            name: _typed(
                lying.column, lying.rows.index_select(0, torch.from_numpy(lying.first[block] + within * lying.step))
            )
            for name, lying in self._columns.items()
        }
        return self._batch(values, block)

    def between(self, first: int, end: int) -> RowBatch:
        """Rows `first` to `end`, in order."""
        spans = list(blocks_between(self._index.starts, first, end))
        values = dict[str, torch.Tensor]()
        for name, lying in self._columns.items():
            words = torch.empty(end - first, lying.rows.shape[1], dtype=lying.rows.dtype)
            flat, unit, at = words.view(-1).view(torch.uint8), lying.rows.stride(0) * words.element_size(), 0
            for block, skipped, rows in spans:
                begin = int(lying.first[block] + skipped * lying.step) * unit
                size = rows * lying.column.width
                flat[at : at + size] = self._memory[begin : begin + size]
                at += size
            values[name] = _typed(lying.column, words)
        return self._batch(values, np.repeat([span[0] for span in spans], [span[2] for span in spans]))

    def _batch(self, values: Mapping[str, torch.Tensor], block: np.ndarray) -> RowBatch:
        return RowBatch(
            points={name: value for name, value in values.items() if name not in IDS},
            token_id=values["token_id"],
            position=values["position"],
            generated=torch.from_numpy(self._index.generated[block]),
            run=torch.from_numpy(self._index.run[block]),
        )


def _least(index: RowIndex, number: int) -> int:
    """The bytes that a file must have."""
    of = index.file == number
    widths = np.array([column.width for column in index.columns.values()])
    return int((index.offsets[:, of] + widths[:, None] * np.diff(index.starts)[of]).max(initial=0))


def _map(path: Path, least: int) -> np.ndarray:
    with path.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    if mapped.size < least:
        raise ValueError(f"{path} is shorter than when it was indexed: index the store anew")
    return mapped


def _lying(memory: torch.Tensor, column: Column, begins: np.ndarray) -> _Lying:
    unit = int(np.gcd.reduce(np.append(begins, column.width)))
    word = _WORDS[gcd(unit, 8)]
    words = memory[: len(memory) // word.itemsize * word.itemsize].view(word)
    width, stride = column.width // word.itemsize, unit // word.itemsize
    # A row from every place where one can begin; they overlap, and each row that there is is one of them.
    rows = words.as_strided(((len(words) - width) // stride + 1, width), (stride, 1))
    return _Lying(column, begins // unit, column.width // unit, rows)


def _typed(column: Column, words: torch.Tensor) -> torch.Tensor:
    return words.view(-1).view(column.dtype).view(len(words), *column.shape)
