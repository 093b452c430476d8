"""Reads batches of stored rows with one copy, from mapped files."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from math import gcd
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from deployments.activations.reader.row_index import Column, RowIndex, blocks_between

_LINE = 64  # bytes of a cache line
_MOST_KEPT = 4  # batches whose memory is used again
_UNUSED = 2  # references to what only a list holds, as sys.getrefcount counts
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowBatch(NamedTuple):
    """Some rows, each with the same index in every field."""

    points: dict[str, torch.Tensor]  # by name `[rows, ...features]`, in the dtype that was stored
    token_id: torch.Tensor  # int32 `[rows]`
    position: torch.Tensor  # index in prompt + generated, int32 `[rows]`
    generated: torch.Tensor  # whether the token was generated; else it is the prompt's, bool `[rows]`
    run: torch.Tensor  # the run, an index of `runs` of what the batch is of, int64 `[rows]`


class _MappedColumn(NamedTuple):
    """A column in memory: its rows begin at multiples of `unit` bytes; each block's row 0 at `first` of them."""

    column: Column
    unit: int
    first: np.ndarray
    rows: torch.Tensor


class RowReader:
    """Reads rows by their numbers; maps the files once, for as long as it lives.

    Batches are in memory of their own, which is used again once nothing holds any of a batch's tensors.
    FileNotFoundError if a file is gone, ValueError if one has become shorter.
    """

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._buffers = _Buffers()
        ends = index.ends
        least = [int(ends[:, index.file == number].max(initial=0)) for number in range(len(index.paths))]
        self._maps = [_map(*each) for each in zip(index.paths, least, strict=True)]
        places = np.array([each.data_ptr() for each in self._maps])
        low, high = int(places.min()), max(each.data_ptr() + len(each) for each in self._maps)
        # One array over all of the maps, and what lies between, which no row names: so that rows out of
        # several files are gathered at once, straight into their places.
        self._memory = np.frombuffer(memoryview((ctypes.c_uint8 * (high - low)).from_address(low)), dtype=np.uint8)
        memory, begins = torch.from_numpy(self._memory), index.offsets + (places - low)[index.file]
        # The first of each group of blocks whose rows lie one after the other in every column: one copy takes them.
        goes_on = (index.file[1:] == index.file[:-1]) & (index.offsets[:, 1:] == ends[:, :-1]).all(axis=0)
        firsts = np.flatnonzero(np.append(True, ~goes_on))
        self._joined = firsts, np.append(index.starts[firsts], index.starts[-1])
        self._columns = {
            name: _mapped_column(memory, column, begins[i]) for i, (name, column) in enumerate(index.columns.items())
        }

    def take(self, numbers: np.ndarray) -> RowBatch:
        """Rows by their numbers, int64 `[rows]`, in that order."""
        block = np.searchsorted(self._index.starts, numbers, side="right") - 1
        within = numbers - self._index.starts[block]
        buffer, begins = self._room(len(numbers))
        for mapped, begin in zip(self._columns.values(), begins, strict=True):
            rows = mapped.first[block] + within * (mapped.column.width // mapped.unit)
            words = _values(buffer, begin, mapped.rows.dtype, (len(numbers), mapped.rows.shape[1]))
            if words.shape[1] == 1:  # numpy is the faster one for rows of a word
                words.numpy()[:, 0] = mapped.rows.numpy()[rows, 0]
            else:
                torch.index_select(mapped.rows, 0, torch.from_numpy(rows), out=words)
        return self._batch(buffer, begins, block)

    def between(self, first: int, end: int) -> RowBatch:
        """Rows `first` to `end`, in order."""
        firsts, starts = self._joined
        spans = [(int(firsts[block]), skipped, rows) for block, skipped, rows in blocks_between(starts, first, end)]
        buffer, begins = self._room(end - first)
        for mapped, begin in zip(self._columns.values(), begins, strict=True):
            to, width = begin, mapped.column.width
            for block, skipped, rows in spans:
                of, size = int(mapped.first[block]) * mapped.unit + skipped * width, rows * width
                buffer[to : to + size] = self._memory[of : of + size]
                to += size
        block, last = np.searchsorted(self._index.starts, [first, end - 1], side="right") - 1
        ends = np.clip(self._index.starts[block : last + 2], first, end)
        return self._batch(buffer, begins, np.repeat(np.arange(block, last + 1), np.diff(ends)))

    def _room(self, rows: int) -> tuple[np.ndarray, list[int]]:
        """Memory for a batch, and where in it each column begins: at a cache line."""
        begins, end = list[int](), 0
        for mapped in self._columns.values():
            begins.append(end)
            end += -(-rows * mapped.column.width // _LINE) * _LINE
        return self._buffers.take(end), begins

    def _batch(self, buffer: np.ndarray, begins: list[int], block: np.ndarray) -> RowBatch:
        values = {
            name: _values(buffer, begin, mapped.column.dtype, (len(block), *mapped.column.shape))
            for (name, mapped), begin in zip(self._columns.items(), begins, strict=True)
        }
        token_id, position = values.pop("token_id"), values.pop("position")
        generated, run = torch.from_numpy(self._index.generated[block]), torch.from_numpy(self._index.run[block])
        return RowBatch(values, token_id, position, generated, run)


def _values(buffer: np.ndarray, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=begin).view(shape)


class _Buffers(threading.local):
    """Reused memory for one thread's batches. New pages cost as much time as filling them."""

    def __init__(self) -> None:
        self._kept = list[np.ndarray]()

    def take(self, size: int) -> np.ndarray:
        """A buffer of `size` bytes, uint8, that no batch holds; its content is arbitrary."""
        self._kept = [buffer for buffer in self._kept if buffer.size == size]
        for i in range(len(self._kept)):
            if sys.getrefcount(self._kept[i]) == _UNUSED:
                return self._kept[i]
        buffer = np.empty(size, dtype=np.uint8)
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(buffer)
        return buffer


def _map(path: Path, least: int) -> torch.Tensor:
    """A file's bytes, uint8; without a descriptor, of which a process may have fewer than a store has files."""
    size = path.stat().st_size
    if size < least:
        raise ValueError(f"{path} is shorter than when it was indexed: index the store again")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _mapped_column(memory: torch.Tensor, column: Column, begins: np.ndarray) -> _MappedColumn:
    unit = int(np.gcd.reduce(np.append(begins, column.width)))
    word = _WORDS[gcd(unit, 8)]
    words = memory[: len(memory) // word.itemsize * word.itemsize].view(word)
    width, stride = column.width // word.itemsize, unit // word.itemsize
    # A row from every place where one can begin; they overlap, and each row that there is is one of them.
    rows = words.as_strided(((len(words) - width) // stride + 1, width), (stride, 1))
    return _MappedColumn(column, unit, begins // unit, rows)
