"""Attention by torch's operations, for models and devices that no kernel takes, and the parameters of all attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from deployments.model.batch import PAGE, Batch
from deployments.model.kv_cache import LayerPages
from deployments.places.attention_patterns import CHUNK, patterns_of

TOGETHER = 16  # single rows of similar length in one product


class Softmax(NamedTuple):
    """How products of a row with keys become weights, as a model's attention module says."""

    scaling: float  # the factor of the products
    window: int = 0  # the most tokens that a row reads, itself included; 0 for all before it
    softcap: float = 0.0  # limits the products by tanh; 0 for none
    sinks: torch.Tensor | None = None  # [heads] logits that take weight without a value
    chunk: int = 0  # rows read only keys of their own chunk, each so many positions from 0 on; 0 without chunks

    @property
    def is_plain(self) -> bool:
        """Whether it has neither a softcap nor sinks."""
        return not self.softcap and self.sinks is None

    def first_key(self, position: Any) -> Any:
        """The position of the first key that a row reads, maybe below 0; of one position or of a tensor of them."""
        if self.chunk:
            return position - position % self.chunk
        return position - self.window + 1 if self.window else position * 0


def attend(
    batch: Batch, spans: Sequence[int], layer: LayerPages, query: torch.Tensor, softmax: Softmax, out: torch.Tensor
) -> None:
    """Write the attention of rows whose keys and values are in their pages.

    Args:
        batch: The rows.
        spans: Indices of the spans that attend.
        layer: The layer's pages.
        query: [1, heads, rows, head_dim].
        softmax: The parameters of the softmax.
        out: [rows, heads, features].
    """
    singles = sorted((index for index in spans if batch.spans[index].count == 1), key=lambda i: batch.spans[i].start)
    for first in range(0, len(singles), TOGETHER):
        _attend_singles(batch, tuple(singles[first : first + TOGETHER]), layer, query, softmax, out)
    for index in (index for index in spans if batch.spans[index].count > 1):
        _attend_prompt(batch, index, layer, query, softmax, out)


def _attend_singles(
    batch: Batch, spans: tuple[int, ...], layer: LayerPages, query: torch.Tensor, softmax: Softmax, out: torch.Tensor
) -> None:
    """Single rows of similar length together, filled up to the longest with page 0."""

    def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = [batch.spans[index].start for index in spans]
        pages = [batch.spans[index].kv.pages[: start // PAGE + 1] for index, start in zip(spans, own, strict=True)]
        numbers = [list(row) + [0] * (len(pages[-1]) - len(row)) for row in pages]
        firsts = [batch.firsts[index] for index in spans]
        rows, table, position = (torch.tensor(part, device=query.device) for part in (firsts, numbers, own))
        keys = torch.arange(table.shape[1] * PAGE, device=query.device)
        return rows, table, _reads(position[:, None], keys, softmax)

    rows, table, read = batch.table(("singles", query.device, spans, softmax.window, softmax.chunk), tables)
    unread = ~read[:, :, None, None]  # memory that may not be finite, and 0 x NaN is NaN
    keys, values = (
        part.view(*read.shape, *part.shape[1:]).masked_fill(unread, 0).transpose(1, 2)  # [rows, kv_heads, keys, ...]
        for part in (layer.keys_of(table.flatten()), layer.values_of(table.flatten())[..., : out.shape[2]])
    )
    queries, rest = query[0].transpose(0, 1)[rows][:, :, None], (softmax.scaling, softmax.softcap, softmax.sinks)
    patterns = patterns_of(queries, keys, read[:, None, None], *rest)  # [rows, heads, 1, keys]
    out[rows] = (patterns.view(len(rows), keys.shape[1], -1, read.shape[1]) @ values).view(len(rows), *out.shape[1:])


def _attend_prompt(
    batch: Batch, index: int, layer: LayerPages, query: torch.Tensor, softmax: Softmax, out: torch.Tensor
) -> None:
    (_, heads, _, _), span = query.shape, batch.spans[index]
    stop = span.start + span.count
    pages = _pages(batch, index, query.device)
    of_heads = (part.transpose(0, 1) for part in (layer.keys_of(pages), layer.values_of(pages)))
    keys, values = (part.repeat_interleave(heads // len(part), 0)[None, :, :stop] for part in of_heads)
    step = span.count if softmax.is_plain else max(1, CHUNK // (heads * stop))  # patterns take memory
    for begin in range(span.start, stop, step):
        end = min(begin + step, stop)
        low = max(0, softmax.first_key(begin))
        rows = slice(batch.firsts[index] + begin - span.start, batch.firsts[index] + end - span.start)
        of_rows, k, v = query[:, :, rows], keys[:, :, low:end], values[:, :, low:end, : out.shape[2]]
        key = "reads", query.device, begin, end, softmax.window, softmax.chunk
        read = batch.table(key, partial(_prompt_reads, begin, end, softmax, query.device))[..., low:]
        if softmax.is_plain:
            attended = functional.scaled_dot_product_attention(of_rows, k, v, attn_mask=read, scale=softmax.scaling)
        else:
            attended = patterns_of(of_rows, k, read, softmax.scaling, softmax.softcap, softmax.sinks) @ v
        out[rows] = attended[0].transpose(0, 1)


def shown_patterns(
    batch: Batch, shown: Sequence[int], layer: LayerPages, query: torch.Tensor, softmax: Softmax, row_by_row: bool
) -> list[torch.Tensor]:
    """The patterns [heads, tokens, keys] of each shown span; arguments are as for `attend`.

    Row by row, the bits of a token's pattern do not depend on the other tokens of the span. Sinks are left out: where
    eager attention takes weight for them, its patterns do not sum to 1, and are no points.
    """
    found = []
    for index in shown:
        span, first = batch.spans[index], batch.firsts[index]
        stop = span.start + span.count
        # each head's lie at a multiple of a page
        keys = layer.keys_of(_pages(batch, index, query.device)).transpose(0, 1).contiguous()
        step = 1 if row_by_row else span.count
        pieces = []
        for at in range(0, span.count, step):
            end = span.start + at + step
            queries = query[:, :, first + at : first + at + step].clone(memory_format=torch.contiguous_format)
            read = _prompt_reads(end - step, end, softmax, query.device)
            piece = patterns_of(queries, keys[None, :, :end], read, softmax.scaling, softmax.softcap)[0]
            pieces.append(piece if end == stop else functional.pad(piece, (0, stop - end)))
        found.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1))
    return found


def _pages(batch: Batch, index: int, device: torch.device) -> torch.Tensor:
    """The pages of a span up to its end."""

    def pages() -> torch.Tensor:
        span = batch.spans[index]
        return torch.tensor(span.kv.pages[: -(-(span.start + span.count) // PAGE)], device=device)

    held: torch.Tensor = batch.table(("pages", device, index), pages)
    return held


def _prompt_reads(start: int, stop: int, softmax: Softmax, device: torch.device) -> torch.Tensor:
    """[1, 1, tokens, keys] whether each token from `start` on reads each of the keys before `stop`."""
    own, keys = torch.arange(start, stop, device=device)[:, None], torch.arange(stop, device=device)
    return _reads(own, keys, softmax)[None, None]


def _reads(position: torch.Tensor, keys: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """[rows, keys] whether rows at positions [rows, 1] read keys at positions [keys]."""
    first: torch.Tensor = softmax.first_key(position)
    return (keys <= position) & (keys >= first)
