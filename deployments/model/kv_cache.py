"""Keys and values of all running sequences, in pages, and the pages that one forward writes and reads."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

PAGE = 16  # positions: one, two or four vectors of the kernel
LANES = 16  # a page's values are padded to a multiple of these features
UNIT_ROWS = 24  # rows of a sequence that a thread takes at once; divisible into groups of 6 and of 8 vectors


@dataclass(eq=False)
class SequenceKv:
    """The pages of one sequence's keys and values.

    Attributes:
        pages: Numbers of its pages, in order.
        passed: The number of leading pages that its rows no longer read and that it does not hold.
        lone: Its own cache, for a model whose sequences do not share forward passes.
        known: The number of its pages that other sequences can find by their tokens.
        chain: The key of these pages' tokens.
    """

    pages: list[int] = field(default_factory=list)
    passed: int = 0
    lone: DynamicCache | None = None
    known: int = 0
    chain: Hashable = None


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of one sequence in a forward pass.

    Attributes:
        kv: The sequence's keys and values, with room for these tokens.
        start: The position of the first token.
        count: The number of tokens.
    """

    kv: SequenceKv
    start: int
    count: int


class Packed:
    """The rows of one forward pass, span after span, and the pages that each reads and writes.

    Attributes:
        spans: The spans in order.
        rows: The total number of tokens.
        positions: [rows] position of each token in its sequence.
        tables: Device -> what attention by torch's operations needs in every layer; see `tables.py`.
    """

    def __init__(self, spans: Sequence[TokenSpan]) -> None:
        self.spans = spans
        self.tables: dict[torch.device, Any] = {}
        counts = [span.count for span in spans]
        self.rows = sum(counts)
        self.firsts = [0, *np.cumsum(counts)[:-1].tolist()]  # each span's first row
        if self.rows == len(spans):
            self.positions = np.array([span.start for span in spans], dtype=np.int64)
        else:
            ranges = [np.arange(span.start, span.start + span.count) for span in spans]
            self.positions = np.concatenate(ranges).astype(np.int64)

    @cached_property
    def reads(self) -> int:
        """The number of keys that all rows read together, without a window."""
        return int(self.positions.sum()) + self.rows

    @cached_property
    def pages(self) -> torch.Tensor:
        """Page numbers of all sequences, concatenated, int32."""
        return torch.from_numpy(np.concatenate([np.asarray(s.kv.pages, dtype=np.int32) for s in self.spans]))

    @cached_property
    def table(self) -> torch.Tensor:
        """[rows] start of each row's sequence in `pages`, int32."""
        sizes = [len(span.kv.pages) for span in self.spans]
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)
        return torch.from_numpy(np.repeat(begins, [span.count for span in self.spans]))

    @cached_property
    def units(self) -> torch.Tensor:
        """[units, 2] first row and number of rows that the kernel takes at once, int32."""
        units = [
            (first + at, min(UNIT_ROWS, span.count - at))
            for first, span in zip(self.firsts, self.spans, strict=True)
            for at in range(0, span.count, UNIT_ROWS)
        ]
        return torch.tensor(units, dtype=torch.int32)

    @cached_property
    def position(self) -> torch.Tensor:
        """[rows] positions, int32."""
        return torch.from_numpy(self.positions.astype(np.int32))

    @cached_property
    def page_of(self) -> torch.Tensor:
        """[rows] the page that each row is written to."""
        at = self.table.long() + torch.from_numpy(self.positions // PAGE)
        return self.pages.long()[at]

    @cached_property
    def offset(self) -> torch.Tensor:
        """[rows] offset of each row within that page."""
        return torch.from_numpy(self.positions % PAGE)


class _Layer(NamedTuple):
    """One layer's pages: keys [pages, kv_heads, head_dim, PAGE], values [pages, kv_heads, PAGE, padded features]."""

    keys: torch.Tensor
    values: torch.Tensor


class PagedCache(Cache):
    """The KV memory of all sequences: pages at fixed addresses, which sequences refer to by number.

    On a CPU, the system allocates a page's memory when it is first written to, in chunks of 2 MiB if it can.
    """

    def __init__(self, pages: int = 1, like: PagedCache | None = None) -> None:
        """Allocate a number of pages.

        Args:
            pages: The number of pages.
            like: A cache after a forward pass, which has the layers' sizes; without it, the first forward pass
                allocates the memory.
        """
        super().__init__(layers=[])
        self._pages = pages
        self._layers: dict[int, _Layer] = {}
        self._windows: dict[int, int] = dict(like._windows) if like is not None else {}
        self._new: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self.packed = Packed([])
        for index, layer in (like._layers if like is not None else {}).items():
            self._layers[index] = _Layer(*(_allocated(part, pages, *part.shape[1:]) for part in layer))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values for attention, which writes them to pages.

        Args:
            key_states: [1, kv_heads, rows, head_dim].
            value_states: [1, kv_heads, rows, features].
            layer_idx: The layer.
            args: Further arguments of some models; unused.
            kwargs: The same.
        """
        self._new = layer_idx, key_states, value_states
        return key_states, value_states

    def take_new(self, key: torch.Tensor, window: int) -> _Layer:
        """The layer whose new keys `update` has just received.

        Args:
            key: The keys.
            window: The most tokens that a row of this layer reads, itself included; 0 for all before it.

        Raises:
            TypeError: They belong to another layer or were changed since, or the layer's window has changed.
        """
        new, self._new = self._new, None
        if new is None or new[1] is not key:
            raise TypeError("its attention reads other keys than those it has just kept")
        index, keys, values = new
        if self._windows.setdefault(index, window) != window:
            raise TypeError("its attention's window changes")
        if index not in self._layers:
            padded = -(-values.shape[3] // LANES) * LANES
            self._layers[index] = _Layer(
                _allocated(keys, self._pages, keys.shape[1], keys.shape[3], PAGE),
                _allocated(values, self._pages, values.shape[1], PAGE, padded),
            )
        return self._layers[index]

    @property
    def window(self) -> int:
        """The most tokens that a row reads in any layer, itself included; 0 if a layer reads all tokens before it."""
        return max(self._windows.values(), default=0) if all(self._windows.values()) else 0

    def zero(self, page: int) -> None:
        """Fill a page with zeros."""
        for layer in self._layers.values():
            for part in layer:
                part[page].zero_()

    def of(self, kv: SequenceKv, tokens: int) -> list[torch.Tensor]:
        """[tokens, kv_heads, features] keys and values of a sequence's first tokens, layer by layer."""
        parts = []
        for layer in self._layers.values():
            for part, slots in ((layer.keys, 3), (layer.values, 2)):
                parts.append(part[kv.pages].movedim(slots, 1).flatten(0, 1)[:tokens])
        return parts

    def release_from(self, page: int) -> None:
        """Return the memory of all pages from this one on to the system, on a CPU; their contents are lost."""
        for part in (part for layer in self._layers.values() for part in layer):
            if page < len(part):
                _advise(part, part[page].data_ptr(), "MADV_DONTNEED")

    @property
    def page_bytes(self) -> Counter[torch.device]:
        """Bytes of one page over all layers on each device, because layers may be on several."""
        sizes: Counter[torch.device] = Counter()
        for layer in self._layers.values():
            for part in layer:
                sizes[part.device] += part[:1].nbytes
        return sizes

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: each forward pass receives its positions."""
        return 0


def _allocated(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """New memory of a shape. With huge pages, a decode's attention takes a tenth to a fifth less time."""
    part = like.new_empty(shape)
    _advise(part, part.data_ptr(), "MADV_HUGEPAGE")
    return part


def _advise(part: torch.Tensor, begin: int, advice: str) -> None:
    """Tell the system how a tensor's memory is used from an address on, on a CPU, if it can be told."""
    begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (part.data_ptr() + part.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if part.device.type == "cpu" and size > 0 and hasattr(mmap, advice):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), getattr(mmap, advice))
