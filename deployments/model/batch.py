"""The rows of one forward pass as tensors, all of them views of one buffer that the host fills and uploads once."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

PAGE = 16  # positions: one, two or four vectors of the C kernel
UNIT_ROWS = 24  # rows of a sequence that a thread takes at once; divisible into groups of 6 and of 8 vectors
FIELDS = 6  # numbers of each row: id, position, page, offset, start, slot


class SequenceKv:
    """The pages of one sequence's keys and values.

    Attributes:
        pages: Numbers of its pages, in order.
        passed: The number of leading pages that its rows no longer read and that it does not hold.
        lone: Its own cache, for a model whose sequences do not share forward passes.
        slot: The slot of its layers' states, if the model has any.
        state_at: The number of tokens that these states have read; -1 while a forward pass changes them.
        known: The number of its pages that other sequences can find by their tokens.
        chain: The key of these pages' tokens.
    """

    def __init__(self, pages: Iterable[int] = (), slot: int = 0) -> None:
        self.pages = array("i", pages)
        self.passed = 0
        self.lone: DynamicCache | None = None
        self.slot = slot
        self.state_at = 0
        self.known = 0
        self.chain: Any = None


@dataclass(eq=False, slots=True)
class TokenSpan:
    """Consecutive tokens of one sequence in a forward pass."""

    kv: SequenceKv  # with room for these tokens
    start: int  # the position of the first
    count: int


class PagePlaces(NamedTuple):
    """Where a batch's rows are in the pages, on one device; int32."""

    position: torch.Tensor  # [rows] position of each row's token in its sequence
    page: torch.Tensor  # [rows] the page that each row is written to
    offset: torch.Tensor  # [rows] its offset within that page
    start: torch.Tensor  # [rows] where the pages of the row's sequence begin in `pages`
    pages: torch.Tensor  # page numbers of all sequences, concatenated


class Batch:
    """The rows of one forward pass, span after span.

    Attributes:
        spans: The sequences of the rows, in order.
        firsts: Each span's first row.
        rows: The number of rows, those of padding included.
        slots: [rows] int32 slot of the states of each row's sequence.
        singles: The number of leading rows that are their span's only one, as in a decode; padding rows are such rows.
        reads: The number of keys that the rows read together, without a window.
        wanted: [wanted] int32 rows whose logits are returned; None for all.
    """

    def __init__(
        self,
        ids: Sequence[int],
        spans: Sequence[TokenSpan],
        wanted: Sequence[int] | None,
        device: torch.device,
        *,
        padded: int = 0,
        padding_page: int = 0,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """Fill a buffer on the host and upload it.

        Args:
            ids: Token ids of all rows.
            spans: The sequences of these rows.
            wanted: The rows whose logits are returned; None for all.
            device: The device of the model's inputs.
            padded: The number of rows with padding.
            padding_page: A page that no sequence reads, to whose first place each padding row writes.
            buffer: int32 memory on the device, which a CUDA graph reads; without it, new memory.
        """
        self.spans = spans
        counts, own = [span.count for span in spans], len(ids)
        decodes = own == len(spans)
        self.rows = max(own, padded)
        self.firsts = [*range(own)] if decodes else [0, *np.cumsum(counts)[:-1].tolist()]
        self.singles = self.rows if decodes else next(i for i, count in enumerate(counts) if count > 1)
        self._tables: dict[Hashable, Any] = {}
        positions: np.ndarray = np.array([span.start for span in spans], np.int32)
        sizes = np.array([len(span.kv.pages) for span in spans], np.int32)
        starts = sizes.cumsum(dtype=np.int32) - sizes
        slots = np.array([span.kv.slot for span in spans], np.int32)
        if not decodes:
            positions = np.repeat(positions - np.array(self.firsts, np.int32), counts) + np.arange(own, dtype=np.int32)
            starts, slots = np.repeat(starts, counts), np.repeat(slots, counts)
        pages = np.frombuffer(b"".join([span.kv.pages for span in spans] + [array("i", [padding_page])]), np.int32)
        fields = np.empty((FIELDS, self.rows), np.int32)
        if own < self.rows:
            fields[:, own:] = [[0], [0], [padding_page], [0], [len(pages) - 1], [0]]
        own_pages = pages[np.minimum(starts + positions // PAGE, len(pages) - 1)]  # a lone model has no pages
        fields[:, :own] = (ids, positions, own_pages, positions % PAGE, starts, slots)
        self.reads = int(positions.sum()) + own
        host = np.concatenate([fields.ravel(), np.asarray(wanted or (), np.int32), pages])
        self._buffer = uploaded(host, device, buffer)
        self.wanted = None if wanted is None else self._buffer[fields.size : -len(pages)]
        number = self._buffer[: fields.size].view(FIELDS, self.rows)
        self._inputs = number[:2, None]
        position, page, offset, start, self.slots = number[1:].unbind()
        places = PagePlaces(position, page, offset, start, self._buffer[len(host) - len(pages) :])
        self._places = {device: places}

    def table(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What attention needs of the batch in every layer, made for the first."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    @property
    def has_tables(self) -> bool:
        """Whether attention has made such tables, which a CUDA graph would not renew."""
        return bool(self._tables)

    def feed(self, tokens: torch.Tensor) -> None:
        """Replace the ids of the first rows by [tokens] ids that are known on the device."""
        self._inputs[0, 0, : len(tokens)] = tokens

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions, [1, rows] int64 each."""
        ids, positions = self._inputs.long().unbind()
        return ids, positions

    def places(self, device: torch.device) -> PagePlaces:
        """The rows' places in the pages, on a device: layers may be on several."""
        if device not in self._places:
            first = next(iter(self._places.values()))
            self._places[device] = PagePlaces(*(part.to(device) for part in first))
        return self._places[device]

    @cached_property
    def units(self) -> torch.Tensor:
        """[units, 2] first row and number of rows that the C kernel takes at once, int32."""
        if self.singles == self.rows:
            return _single_units(self.rows)
        units = [
            (first + at, min(UNIT_ROWS, span.count - at))
            for first, span in zip(self.firsts, self.spans, strict=True)
            for at in range(0, span.count, UNIT_ROWS)
        ]
        return torch.tensor(units, dtype=torch.int32)


@cache
def _single_units(rows: int) -> torch.Tensor:
    return torch.tensor([(row, 1) for row in range(rows)], dtype=torch.int32)


def uploaded(numbers: np.ndarray, device: torch.device, buffer: torch.Tensor | None = None) -> torch.Tensor:
    """Numbers on a device, at the beginning of a buffer if there is one; the host does not wait for a GPU.

    Not run with a buffer on a GPU yet.
    """
    host = torch.from_numpy(numbers)
    if device.type == "cuda":
        host = host.pin_memory()
    if buffer is None:
        return host.to(device, non_blocking=True)
    buffer[: len(host)].copy_(host, non_blocking=True)
    return buffer
