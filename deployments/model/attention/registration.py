"""Attention of packed rows as transformers calls it: each reads the pages of its own sequence, up to itself.

transformers looks attention functions up by name; while the engine runs a forward, the model's config names the one
registered here. For an unknown name transformers builds no mask, and none is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from deployments.model.attention import flash, reference, triton_decode
from deployments.model.attention.reference import Softmax
from deployments.model.batch import Batch
from deployments.model.kv_cache import LayerPages, PagedCache
from deployments.model.native import Call, attention_kernel, worthwhile_threads
from deployments.model.packing import UnsupportedModelError
from deployments.places.attention_patterns import ROWS, attending, visited

NAME = "vitrine_packed"
THREAD_PRODUCTS = 500_000  # about 30 microseconds of a thread


class _Running(threading.local):
    batch: Batch | None = None
    cache: PagedCache
    batch_invariant = False


_running = _Running()


@contextmanager
def packed_attention(
    configs: Sequence[Any], batch: Batch, cache: PagedCache, batch_invariant: bool = False
) -> Iterator[None]:
    """While open, the attention of a model with these configs runs a batch over a cache's pages.

    If it is batch invariant, each token's pattern is computed by itself: its bits do not depend on other sequences.
    """
    _running.batch, _running.cache, _running.batch_invariant = batch, cache, batch_invariant
    cache.begin(batch)
    try:
        with attending(configs, NAME):
            yield
    finally:
        _running.batch = None
        cache.begin(None)


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
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **_options: Any,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Attention as called by transformers, for one forward pass of packed rows.

    Of query [1, heads, rows, head_dim], key [1, kv_heads, rows, head_dim] and value [1, kv_heads, rows, features] it
    gives [1, rows, heads, features]; and [heads, tokens, keys] for each span whose patterns are shown.
    """
    batch = _running.batch
    assert batch is not None, "only an engine's forward runs with it"
    if attention_mask is not None or position_bias is not None or is_causal is False or len(query) != 1:
        raise TypeError("its attention has masks of its own")
    if indices is not None or block_indices is not None:
        raise TypeError("its attention reads only keys that it selects")
    if not query.dtype == key.dtype == value.dtype or query.shape[1] % key.shape[1]:
        raise TypeError("its queries, keys and values do not fit together")
    if not query.size(2) == key.size(2) == value.size(2) == batch.rows:
        raise TypeError("its attention reads other rows than those of the forward pass")
    window, chunk = sliding_window or 0, 0 if sliding_window else _chunk_of(module)
    layer = _running.cache.pages_for(key, value, window or chunk)
    query, key = visited(module, query, key)
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    softmax = Softmax(scaling, window, softcap or 0.0, s_aux, chunk)
    query, key, value = (rows if rows.stride(3) == 1 else rows.contiguous() for rows in (query, key, value))
    if layer.by_heads:
        out = by_c_kernel(batch, layer, query, key, value, softmax)
    elif _running.batch_invariant:
        raise UnsupportedModelError(f"batch_invariant needs the attention kernel, which does not take {query.dtype}")
    else:
        out = _attend_in_parts(batch, layer, query, key, value, softmax)
    shown = module.__dict__.get(ROWS)  # a missing attribute would cost a search in torch
    if shown is None:
        return out[None], None
    return out[None], reference.shown_patterns(batch, shown, layer, query, softmax, _running.batch_invariant)


AttentionInterface.register(NAME, _attend)


def by_c_kernel(
    batch: Batch, layer: LayerPages, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    """Write the rows' keys and values to their pages, and attend on a CPU by `paged_attention.c`.

    Query, key and value, shaped as in `_attend`, may have any strides but a last one of 1.

    Returns:
        [rows, heads, features].
    """
    run = attention_kernel(query.dtype)
    assert run is not None, "its layout is the kernel's"
    (_, heads, rows, size), width = query.shape, value.shape[3]
    out = query.new_empty(rows, heads, width)
    sinks = None if softmax.sinks is None else softmax.sinks.float().contiguous()
    places = batch.places(query.device)
    call = Call(
        *(tensor.data_ptr() for tensor in (query, key, value, layer.keys, layer.values, out)),
        None if sinks is None else sinks.data_ptr(),
        *(tensor.data_ptr() for tensor in (places.position, places.start, places.pages, batch.units)),
        *(stride for tensor in (query, key, value) for stride in (tensor.stride(2), tensor.stride(1))),
        *(rows, len(batch.units), heads, key.shape[1], size, width, layer.values.shape[3]),
        *(softmax.window, softmax.chunk, worthwhile_threads(batch.reads * heads * (size + width), THREAD_PRODUCTS)),
        *(softmax.scaling, softmax.softcap),
    )
    if run(byref(call)):
        raise MemoryError("not enough memory for attention's products")
    return out


def _chunk_of(module: torch.nn.Module) -> int:
    """The positions of a chunk if the layer has chunks, else 0: transformers says it only by masks, from its config."""
    config: Any = module.__dict__.get("config")
    size: int | None = None if config is None else config.__dict__.get("attention_chunk_size")
    return size if size and config.layer_types[module.layer_idx] == "chunked_attention" else 0


def _attend_in_parts(
    batch: Batch, layer: LayerPages, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    """[rows, heads, features]: single rows and prompts, each by the fastest function that takes them."""
    (_, heads, rows, _), width, singles = query.shape, value.shape[3], batch.singles
    places, out = batch.places(query.device), query.new_empty(rows, heads, width)
    by_triton = singles and triton_decode.takes(query, key, width, softmax)
    if singles < rows or not by_triton:
        layer.keys[places.page, places.offset] = key[0].transpose(0, 1)
        layer.values[places.page, places.offset] = value[0].transpose(0, 1)
    if by_triton:  # it writes keys and values, too
        own_query, own_key, own_value = (part[0, :, :singles].transpose(0, 1) for part in (query, key, value))
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count
        splits = triton_decode.splits_for(singles, key.shape[1], processors)
        triton_decode.decode_attention(own_query, own_key, own_value, layer, places, softmax, splits, out[:singles])
    elif singles:
        out[len(batch.spans) : singles] = 0
        reference.attend(batch, range(min(singles, len(batch.spans))), layer, query, softmax, out)
    if singles < rows and flash.takes(query, width, softmax):
        flash.attend_prompts(batch, layer, query, key, value, softmax, out)
    elif singles < rows:
        reference.attend(batch, range(singles, len(batch.spans)), layer, query, softmax, out)
    return out
