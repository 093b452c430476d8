"""Attention of packed rows: each reads the keys and values in its own sequence's pages, up to itself.

transformers looks attention functions up by name; while the engine runs a forward, the model's config names the one
registered here. For an unknown name transformers builds no mask, and none is needed.

More than 300 lines, because the kernel and torch's operations compute the same, side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from deployments.model.kv_cache import PAGE, Packed, PagedCache, TokenSpan
from deployments.model.native import Call, attention_kernel, worthwhile_threads
from deployments.model.packing import UnsupportedModelError
from deployments.places.attention_patterns import ROWS, patterns_of

NAME = "vitrine_packed"
THREAD_PRODUCTS = 500_000  # about 30 microseconds of a thread
SPREAD = 2  # single rows share a gathered batch while the longest has at most this many times the shortest's pages


class _Softmax(NamedTuple):
    """How products of a row with keys become weights.

    Attributes:
        scaling: The factor of the products.
        window: The most tokens that a row reads, itself included; 0 for all before it.
        softcap: Limits the products by tanh; 0 for none.
        sinks: [heads] logits that take weight without a value.
    """

    scaling: float
    window: int
    softcap: float
    sinks: torch.Tensor | None


class _Running(threading.local):
    cache: PagedCache | None = None
    batch_invariant = False


_running = _Running()


def configs_of(model: torch.nn.Module) -> list[Any]:
    """The configs that select the attention of a model's modules, without repetition."""
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return list(found.values())


@contextmanager
def packed_attention(configs: Sequence[Any], cache: PagedCache, batch_invariant: bool = False) -> Iterator[None]:
    """While open, a model's attention reads and writes a cache's pages as its `packed` says.

    Args:
        configs: The model's configs from `configs_of`.
        cache: The cache, with `packed` set.
        batch_invariant: Compute each token's pattern by itself, so that its bits do not depend on other sequences.
    """
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        _running.cache, _running.batch_invariant = cache, batch_invariant
        yield
    finally:
        _running.cache = None
        for config, name in before:
            config._attn_implementation = name


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_options: Any,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Attention as called by transformers, for one forward pass of packed rows.

    Args:
        module: The attention module.
        query: [1, heads, rows, head_dim].
        key: [1, kv_heads, rows, head_dim] of the same rows.
        value: [1, kv_heads, rows, features].
        attention_mask: None.
        scaling: The factor of the products; by default one over the root of head_dim.
        sliding_window: The most tokens that a row reads, itself included.
        softcap: Bounds the products by its tanh.
        s_aux: [heads] logits of sinks, which take weight and give nothing.
        position_bias: None.
        is_causal: Not False.

    Returns:
        [1, rows, heads, features]; and [heads, tokens, keys] for each span whose patterns are shown.

    Raises:
        TypeError: The model uses a feature that packed rows do not support.
        UnsupportedModelError: The model is batch invariant, and no kernel takes its dtype.
    """
    cache = _running.cache
    assert cache is not None, "only an engine's forward runs with it"
    if attention_mask is not None or position_bias is not None or is_causal is False or len(query) != 1:
        raise TypeError("its attention has masks of its own")
    if not query.dtype == key.dtype == value.dtype or query.shape[1] % key.shape[1]:
        raise TypeError("its queries, keys and values do not fit together")
    layer = cache.take_new(key, sliding_window or 0)
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    softmax = _Softmax(scaling, sliding_window or 0, softcap or 0.0, s_aux)
    run = attention_kernel(query.dtype) if query.device.type == "cpu" else None
    if run:
        query, key, value = (rows if rows.stride(3) == 1 else rows.contiguous() for rows in (query, key, value))
        out = _by_kernel(run, cache.packed, layer, query, key, value, softmax)
    elif _running.batch_invariant:
        raise UnsupportedModelError(f"batch_invariant needs the attention kernel, which does not take {query.dtype}")
    else:
        out = _by_torch(cache.packed, layer, query, key, value, softmax)
    shown = module.__dict__.get(ROWS)  # a missing attribute would cost a search in torch
    patterns = None if shown is None else _shown_patterns(cache.packed, shown, layer, query, softmax)
    return out[None], patterns


def _shown_patterns(
    packed: Packed, shown: Sequence[int], layer: Any, query: torch.Tensor, softmax: _Softmax
) -> list[torch.Tensor]:
    """The patterns [heads, tokens, keys] of each shown span."""

    def pattern(span: TokenSpan, first: int, keys: torch.Tensor) -> torch.Tensor:
        queries = query[:, :, first : first + span.count].clone(memory_format=torch.contiguous_format)
        return _patterns(queries, keys[None], _reads(span, softmax.window, query.device), softmax)[0]

    patterns = []
    for index in shown:
        span, first = packed.spans[index], packed.firsts[index]
        keys = _gathered_keys(layer, span)
        if not _running.batch_invariant:
            patterns.append(pattern(span, first, keys))
            continue
        stop = span.start + span.count
        patterns.append(query.new_zeros(query.shape[1], span.count, stop))
        for row in range(span.count):
            own = TokenSpan(span.kv, span.start + row, 1)
            patterns[-1][:, row, : own.start + 1] = pattern(own, first + row, keys[:, : own.start + 1])[:, 0]
    return patterns


AttentionInterface.register(NAME, _attend)


def _by_kernel(
    run: Callable[[Any], int],
    packed: Packed,
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax: _Softmax,
) -> torch.Tensor:
    """[rows, heads, features] by the compiled kernel, which also writes keys and values."""
    (_, heads, rows, size), width = query.shape, value.shape[3]
    out = query.new_empty(rows, heads, width)
    sinks = None if softmax.sinks is None else softmax.sinks.float().contiguous()
    call = Call(
        *(tensor.data_ptr() for tensor in (query, key, value, layer.keys, layer.values, out)),
        None if sinks is None else sinks.data_ptr(),
        *(tensor.data_ptr() for tensor in (packed.position, packed.table, packed.pages, packed.units)),
        *(stride for tensor in (query, key, value) for stride in (tensor.stride(2), tensor.stride(1))),
        *(rows, len(packed.units), heads, key.shape[1], size, width, layer.values.shape[3]),
        *(softmax.window, worthwhile_threads(packed.reads * heads * (size + width), THREAD_PRODUCTS)),
        *(softmax.scaling, softmax.softcap),
    )
    if run(byref(call)):
        raise MemoryError("not enough memory for attention's products")
    return out


# ---- by torch's own operations, on a GPU and without a compiler


def _by_torch(
    packed: Packed, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax: _Softmax
) -> torch.Tensor:
    """[rows, heads, features]: a prompt's rows separately, single rows together with others of similar length."""
    width, device = value.shape[3], query.device
    pages, offsets, groups = _device_rows(packed, device)
    layer.keys[pages, :, :, offsets] = key[0].transpose(0, 1)
    layer.values[pages, :, offsets, :width] = value[0].transpose(0, 1)
    out = query.new_empty(packed.rows, query.shape[1], width)
    for first, span in zip(packed.firsts, packed.spans, strict=True):
        if span.count == 1:
            continue
        keys, values = _gathered(layer, span, width)
        reads = _reads(span, softmax.window, device)
        rows = slice(first, first + span.count)
        found = _products(query[:, :, rows], keys[None], values[None], reads, softmax)
        out[rows] = found[0].transpose(0, 1)
    for at, padded, own in groups:
        keys = layer.keys[padded].permute(0, 2, 3, 1, 4).flatten(3)  # [group, kv_heads, head_dim, keys]
        values = layer.values[padded].permute(0, 2, 1, 3, 4).flatten(2, 3)[..., :width]
        reads = _read_by(own, padded.shape[1] * PAGE, softmax.window)  # [group, keys]
        unread = ~reads[:, None]  # unread memory may not be finite, and 0 x NaN is NaN
        keys, values = keys.masked_fill(unread[:, :, None], 0), values.masked_fill(unread[..., None], 0)
        rows_of = query[0].transpose(0, 1)[at, :, None]  # [group, heads, 1, head_dim]
        out[at] = _products(rows_of, keys.transpose(2, 3), values, reads[:, None, None], softmax).squeeze(2)
    return out


class _DeviceRows(NamedTuple):
    """The pages of a forward pass's rows on a device: the same for every layer.

    Attributes:
        pages: [rows] the page that each row is written to.
        offsets: [rows] its offset within that page.
        groups: Single rows of similar length: [group] rows, [group, pages] their tables, [group, 1] positions.
    """

    pages: torch.Tensor
    offsets: torch.Tensor
    groups: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _device_rows(packed: Packed, device: torch.device) -> _DeviceRows:
    if device not in packed.uploaded:
        singles = [one for one in zip(packed.firsts, packed.spans, strict=True) if one[1].count == 1]
        groups = []
        for group in _alike(singles):
            tables = [span.kv.pages[: span.start // PAGE + 1] for _, span in group]
            longest = max(map(len, tables))
            padded = [table + [0] * (longest - len(table)) for table in tables]
            rows = torch.tensor([first for first, _ in group], device=device)
            own = torch.tensor([[span.start] for _, span in group], device=device)
            groups.append((rows, torch.tensor(padded, device=device), own))
        packed.uploaded[device] = _DeviceRows(packed.page_of.to(device), packed.offset.to(device), groups)
    found: _DeviceRows = packed.uploaded[device]
    return found


def _alike(singles: Sequence[tuple[int, TokenSpan]]) -> Iterator[list[tuple[int, TokenSpan]]]:
    """Group single rows of similar length."""
    group: list[tuple[int, TokenSpan]] = []
    for one in sorted(singles, key=lambda one: one[1].start):
        if group and one[1].start // PAGE + 1 > SPREAD * (group[0][1].start // PAGE + 1):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _gathered(layer: Any, span: TokenSpan, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence's keys [kv_heads, keys, head_dim] and values [kv_heads, keys, features] up to a span's end."""
    stop = span.start + span.count
    values = layer.values[_pages(layer, span)].transpose(0, 1).flatten(1, 2)[:, :stop, :width]
    return _gathered_keys(layer, span), values


def _gathered_keys(layer: Any, span: TokenSpan) -> torch.Tensor:
    """A sequence's keys [kv_heads, keys, head_dim] up to a span's end; each head's lie at a multiple of a page."""
    keys: torch.Tensor = layer.keys[_pages(layer, span)].permute(1, 0, 3, 2).flatten(1, 2)
    return keys[:, : span.start + span.count]


def _pages(layer: Any, span: TokenSpan) -> torch.Tensor:
    """The pages of a sequence up to a span's end."""
    stop = span.start + span.count
    return torch.tensor(span.kv.pages[: -(-stop // PAGE)], device=layer.keys.device)


def _reads(span: TokenSpan, window: int, device: torch.device) -> torch.Tensor:
    """[1, 1, tokens, keys] whether each token of a span reads each key."""
    stop = span.start + span.count
    return _read_by(torch.arange(span.start, stop, device=device)[:, None], stop, window)[None, None]


def _read_by(own: torch.Tensor, keys: int, window: int) -> torch.Tensor:
    """[rows, keys] whether rows at the positions `own` [rows, 1] read each of `keys` keys."""
    positions = torch.arange(keys, device=own.device)
    reads = positions <= own
    return reads & (positions > own - window) if window else reads


def _products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, reads: torch.Tensor, softmax: _Softmax
) -> torch.Tensor:
    """[batch, heads, tokens, features] of a query [batch, heads, tokens, head_dim]."""
    values = values.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    if softmax.softcap or softmax.sinks is not None:
        return _patterns(query, keys, reads, softmax) @ values
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=reads, scale=softmax.scaling)


def _patterns(query: torch.Tensor, keys: torch.Tensor, reads: torch.Tensor, softmax: _Softmax) -> torch.Tensor:
    """[batch, heads, tokens, keys] of a query [batch, heads, tokens, head_dim]."""
    return patterns_of(query, keys, reads, softmax.scaling, softmax.softcap, softmax.sinks)
