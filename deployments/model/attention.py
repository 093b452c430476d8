"""Attention of packed rows: each reads the keys and values in its own sequence's pages, up to itself.

transformers looks attention functions up by name; while the engine runs a forward, the model's config names the one
registered here. For an unknown name transformers builds no mask, and none is needed.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import AttentionInterface

from deployments.model.kv_cache import Packed, PagedCache, TokenSpan
from deployments.model.native import Call, attention_kernel, worthwhile_threads
from deployments.model.packing import UnsupportedModelError
from deployments.model.tables import Mask, Prompts, pages_of, reads, tables_of, uploaded
from deployments.places.attention_patterns import ROWS, patterns_of

NAME = "vitrine_packed"
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
THREAD_PRODUCTS = 500_000  # about 30 microseconds of a thread


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
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return list(configs.values())


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
        return _patterns(queries, keys[None], reads(span, softmax.window, query.device), softmax)[0]

    patterns = []
    for index in shown:
        span, first = packed.spans[index], packed.firsts[index]
        (pages,) = uploaded([pages_of(span)], query.device)
        keys = _gathered_keys(layer, span, pages)
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
    width, tables = value.shape[3], tables_of(packed, query.device)
    layer.keys[tables.pages, :, :, tables.offsets] = key[0].transpose(0, 1)
    layer.values[tables.pages, :, tables.offsets, :width] = value[0].transpose(0, 1)
    out = query.new_empty(packed.rows, query.shape[1], width)
    together = tables.together if _fits_flash(query, width, softmax) else None
    if together:
        out[together.rows] = _flash(together, layer, query, key, value, softmax)
    for first, span in tables.prompts if together is None else ():
        rows = slice(first, first + span.count)
        keys, values = key[:, :, rows], value[:, :, rows]
        if span.start:
            keys, values = _gathered(layer, span, tables.prefix(first, span), width)
        mask = None if _is_causal(span, softmax) else tables.prompt_mask(first, span, softmax.window)
        out[rows] = _products(query[:, :, rows], keys, values, mask, softmax)[0].transpose(0, 1)
    for group, (at, table, _) in enumerate(tables.groups):
        mask = tables.group_mask(group, softmax.window)  # [group, 1, 1, keys]
        keys = layer.keys[table].permute(0, 2, 1, 4, 3).flatten(2, 3).contiguous()  # [group, kv_heads, keys, head_dim]
        values = layer.values[table].permute(0, 2, 1, 3, 4).flatten(2, 3)[..., :width]
        keys.masked_fill_(mask.unread.mT, 0)  # unread memory may not be finite, and 0 x NaN is NaN
        values.masked_fill_(mask.unread.mT, 0)
        rows_of = query[0].transpose(0, 1)[at, :, None]  # [group, heads, 1, head_dim]
        out[at] = _products(rows_of, keys, values, mask, softmax).squeeze(2)
    return out


def _fits_flash(query: torch.Tensor, width: int, softmax: _Softmax) -> bool:
    """Whether torch's flash attention takes these rows."""
    size = query.shape[3]
    plain = not softmax.softcap and softmax.sinks is None
    return plain and query.dtype.itemsize == 2 and width == size <= 256 and size % 8 == 0 and _has_flash(query.device)


@functools.cache
def _has_flash(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _flash(
    prompts: Prompts, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax: _Softmax
) -> torch.Tensor:
    """[rows, heads, features] of all prompts in one call; each row reads the keys up to its own."""
    keys, values = key[0, :, prompts.rows].transpose(0, 1), value[0, :, prompts.rows].transpose(0, 1)
    if prompts.keys:
        pages, offsets = prompts.keys
        keys, values = layer.keys[pages, :, :, offsets], layer.values[pages, :, offsets, : value.shape[3]]
    out: Any = varlen_attn(
        query[0, :, prompts.rows].transpose(0, 1),
        keys,
        values,
        prompts.starts,
        prompts.key_starts,
        prompts.longest,
        prompts.most_keys,
        scale=softmax.scaling,
        window_size=(softmax.window - 1, 0),
        **_GROUPED,
    )
    return out  # type: ignore[no-any-return]


def _is_causal(span: TokenSpan, softmax: _Softmax) -> bool:
    """Whether each row of a prompt reads all keys before it, which are the prompt's own, in torch's own products."""
    reads_all = not span.start and (not softmax.window or softmax.window >= span.count)
    return reads_all and not softmax.softcap and softmax.sinks is None


def _gathered(layer: Any, span: TokenSpan, pages: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence's keys [1, kv_heads, keys, head_dim] and values [1, kv_heads, keys, features] up to a span's end."""
    stop = span.start + span.count
    values = layer.values[pages].transpose(0, 1).flatten(1, 2)[:, :stop, :width]
    return _gathered_keys(layer, span, pages)[None], values[None]


def _gathered_keys(layer: Any, span: TokenSpan, pages: torch.Tensor) -> torch.Tensor:
    """A sequence's keys [kv_heads, keys, head_dim] up to a span's end; each head's lie at a multiple of a page."""
    keys: torch.Tensor = layer.keys[pages].permute(1, 0, 3, 2).flatten(1, 2).contiguous()
    return keys[:, : span.start + span.count]


def _products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Mask | None, softmax: _Softmax
) -> torch.Tensor:
    """[batch, heads, tokens, features] of a query [batch, heads, tokens, head_dim]; without a mask, causal.

    Heads that share keys are a batch's or rows of one product, so that no key is copied for each of them.
    """
    (batch, heads, tokens, size), kv_heads = query.shape, keys.shape[1]
    if softmax.softcap or softmax.sinks is not None:
        assert mask is not None
        return _patterns(query, keys, mask.reads, softmax) @ values.repeat_interleave(heads // kv_heads, 1)
    if tokens == 1:
        query = query.reshape(batch, kv_heads, heads // kv_heads, size)
    else:
        assert batch == 1
        query = query.reshape(kv_heads, heads // kv_heads, tokens, size)
        keys, values = (part.transpose(0, 1).expand(-1, heads // kv_heads, -1, -1) for part in (keys, values))
    added = None if mask is None else mask.added(query.dtype)
    out = functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=added, is_causal=mask is None, scale=softmax.scaling
    )
    return out.reshape(batch, heads, tokens, -1)


def _patterns(query: torch.Tensor, keys: torch.Tensor, read: torch.Tensor, softmax: _Softmax) -> torch.Tensor:
    """[batch, heads, tokens, keys] of a query [batch, heads, tokens, head_dim]."""
    return patterns_of(query, keys, read, softmax.scaling, softmax.softcap, softmax.sinks)
