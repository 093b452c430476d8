"""The rows of one forward pass on a device, for attention by torch's operations: made once for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from deployments.model.kv_cache import PAGE, Packed, TokenSpan

SPREAD = 2  # single rows share a gathered batch while the longest has at most this many times the shortest's pages
ALIGNED = 8  # entries: torch copies a mask in every call if its rows do not begin at multiples of these


class Mask:
    """Which keys each row reads.

    Attributes:
        reads: [batch, 1, tokens, keys] bool.
    """

    def __init__(self, reads: torch.Tensor) -> None:
        self.reads = reads
        self._added: dict[torch.dtype, torch.Tensor] = {}

    @cached_property
    def unread(self) -> torch.Tensor:
        """The opposite of `reads`."""
        return ~self.reads

    def added(self, dtype: torch.dtype) -> torch.Tensor:
        """What is added to products: 0 where a key is read, else minus infinity."""
        if dtype not in self._added:
            *shape, keys = self.reads.shape
            room = self.reads.new_zeros(*shape, -(-keys // ALIGNED) * ALIGNED, dtype=dtype)
            self._added[dtype] = room[..., :keys].masked_fill_(self.unread, -torch.inf)
        return self._added[dtype]


class Prompts(NamedTuple):
    """All spans of several tokens, for one call of attention.

    Attributes:
        rows: Their rows.
        starts: [spans + 1] int32 the first of these rows of each, and their number.
        key_starts: [spans + 1] int32 the same of the keys that they read.
        longest: The most tokens of a span.
        most_keys: The most keys of a span.
        keys: The page and offset of each key; None if all keys are of these rows.
    """

    rows: slice
    starts: torch.Tensor
    key_starts: torch.Tensor
    longest: int
    most_keys: int
    keys: tuple[torch.Tensor, torch.Tensor] | None


class Tables:
    """Pages and masks of a forward pass's rows.

    Attributes:
        together: All prompts, if their rows follow each other.
        pages: [rows] the page that each row is written to.
        offsets: [rows] its offset within that page.
        prompts: Spans of several tokens, with their first rows.
        groups: Single rows of similar length: [group] rows, [group, pages] their tables, [group, 1] positions.
        more: The other arrays that were uploaded.
    """

    def __init__(self, packed: Packed, device: torch.device, more: Sequence[np.ndarray] = ()) -> None:
        """Upload the tables.

        Args:
            packed: The forward pass.
            device: Where its attention runs.
            more: Further arrays to upload with them.
        """
        spans = list(zip(packed.firsts, packed.spans, strict=True))
        self.prompts = [(first, span) for first, span in spans if span.count > 1]
        groups = list(_alike([single for single in spans if single[1].count == 1]))
        arrays = [packed.page_of.numpy(), packed.offset.numpy()]
        for group in groups:
            arrays += [np.array([first for first, _ in group]), _table(group)]
            arrays.append(np.array([[span.start] for _, span in group]))
        together = _together(self.prompts)
        parts = iter(uploaded([*arrays, *together, *more], device))
        self.pages, self.offsets = next(parts), next(parts)
        self.groups = [(next(parts), next(parts), next(parts)) for _ in groups]
        self.together = self._prompts([next(parts) for _ in together]) if together else None
        self.more = list(parts)
        self._prefixes: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[str, int, int], Mask] = {}

    def _prompts(self, uploaded: Sequence[torch.Tensor]) -> Prompts:
        """All prompts, with the arrays of `_together` on the device."""
        starts, key_starts, *keys = uploaded
        (first, _), (last, span) = self.prompts[0], self.prompts[-1]
        counts = [span.count for _, span in self.prompts]
        stops = [span.start + span.count for _, span in self.prompts]
        places = (keys[0], keys[1]) if keys else None
        return Prompts(slice(first, last + span.count), starts.int(), key_starts.int(), max(counts), max(stops), places)

    def prefix(self, first: int, span: TokenSpan) -> torch.Tensor:
        """[pages] the pages up to the end of the prompt with this first row, uploaded for its first layer."""
        if first not in self._prefixes:
            (self._prefixes[first],) = uploaded([pages_of(span)], self.pages.device)
        return self._prefixes[first]

    def prompt_mask(self, first: int, span: TokenSpan, window: int) -> Mask:
        """The mask [1, 1, tokens, keys] of the prompt with this first row."""
        key = "prompt", first, window
        if key not in self._masks:
            self._masks[key] = Mask(reads(span, window, self.pages.device))
        return self._masks[key]

    def group_mask(self, group: int, window: int) -> Mask:
        """The mask [rows, 1, 1, keys] of a group of single rows."""
        key = "group", group, window
        if key not in self._masks:
            _, table, own = self.groups[group]
            self._masks[key] = Mask(_read_by(own, table.shape[1] * PAGE, window)[:, None, None])
        return self._masks[key]


def tables_of(packed: Packed, device: torch.device) -> Tables:
    """A forward pass's tables on a device: layers may be on several."""
    if device not in packed.tables:
        packed.tables[device] = Tables(packed, device)
    tables: Tables = packed.tables[device]
    return tables


def uploaded(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays of int64 on a device. A GPU receives all of them in one copy, for which the host does not wait."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    host = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).pin_memory()
    parts = torch.split(host.to(device, non_blocking=True), [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def pages_of(span: TokenSpan) -> np.ndarray:
    """[pages] the pages of a sequence up to a span's end."""
    return np.array(span.kv.pages[: -(-(span.start + span.count) // PAGE)], dtype=np.int64)


def reads(span: TokenSpan, window: int, device: torch.device) -> torch.Tensor:
    """[1, 1, tokens, keys] whether each token of a span reads each key."""
    stop = span.start + span.count
    return _read_by(torch.arange(span.start, stop, device=device)[:, None], stop, window)[None, None]


def _read_by(own: torch.Tensor, keys: int, window: int) -> torch.Tensor:
    """[rows, keys] whether rows at the positions `own` [rows, 1] read each of `keys` keys."""
    positions = torch.arange(keys, device=own.device)
    reads = positions <= own
    return reads & (positions > own - window) if window else reads


def _together(prompts: Sequence[tuple[int, TokenSpan]]) -> list[np.ndarray]:
    """Where each prompt's rows and keys begin, and if one has a prefix the page and offset of each key.

    Nothing where there is no prompt, or where other rows lie between them.
    """
    counts = [span.count for _, span in prompts]
    if not prompts or prompts[-1][0] + counts[-1] != prompts[0][0] + sum(counts):
        return []
    stops = [span.start + span.count for _, span in prompts]
    starts = [np.cumsum([0, *counts]), np.cumsum([0, *stops])]
    if stops == counts:
        return starts
    positions = [np.arange(stop) for stop in stops]
    pages = [pages_of(span)[at // PAGE] for (_, span), at in zip(prompts, positions, strict=True)]
    return [*starts, np.concatenate(pages), np.concatenate(positions) % PAGE]


def _table(group: Sequence[tuple[int, TokenSpan]]) -> np.ndarray:
    """[group, pages] the pages of single rows, those of shorter sequences filled up with page 0."""
    tables = [span.kv.pages[: span.start // PAGE + 1] for _, span in group]
    longest = max(map(len, tables))
    return np.array([table + [0] * (longest - len(table)) for table in tables], dtype=np.int64)


def _alike(singles: Sequence[tuple[int, TokenSpan]]) -> Iterator[list[tuple[int, TokenSpan]]]:
    """Group single rows of similar length."""
    group: list[tuple[int, TokenSpan]] = []
    for single in sorted(singles, key=lambda single: single[1].start):
        if group and single[1].start // PAGE + 1 > SPREAD * (group[0][1].start // PAGE + 1):
            yield group
            group = []
        group.append(single)
    if group:
        yield group
