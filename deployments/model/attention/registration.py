"""Attention of packed rows as transformers calls it: each reads the pages of its own sequence, up to itself.

transformers looks attention functions up by name; while the engine runs a forward, the model's config names the one
registered here. For an unknown name transformers builds no mask, and none is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from deployments.model.attention import c_kernel, flash, reference, triton_decode
from deployments.model.attention.softmax import Softmax
from deployments.model.batch import Batch
from deployments.model.kv_cache import LayerPages, PagedCache
from deployments.model.native import attention_kernel
from deployments.model.packing import UnsupportedModelError
from deployments.places.attention_patterns import ROWS

NAME = "vitrine_packed"


class _Running(threading.local):
    batch: Batch | None = None
    cache: PagedCache
    batch_invariant = False


_running = _Running()


def configs_of(model: torch.nn.Module) -> list[Any]:
    """The configs that select the attention of a model's modules, without repetition."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return list(configs.values())


@contextmanager
def packed_attention(
    configs: Sequence[Any], batch: Batch, cache: PagedCache, batch_invariant: bool = False
) -> Iterator[None]:
    """While open, a model's attention runs a batch over a cache's pages.

    Args:
        configs: The model's configs from `configs_of`.
        batch: The rows.
        cache: The pages.
        batch_invariant: Compute each token's pattern by itself, so that its bits do not depend on other sequences.
    """
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        _running.batch, _running.cache, _running.batch_invariant = batch, cache, batch_invariant
        yield
    finally:
        _running.batch = None
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

    Of query [1, heads, rows, head_dim], key [1, kv_heads, rows, head_dim] and value [1, kv_heads, rows, features] it
    gives [1, rows, heads, features]; and [heads, tokens, keys] for each span whose patterns are shown.

    Raises:
        TypeError: The model uses a feature that packed rows do not support.
        UnsupportedModelError: The model is batch invariant, and no kernel takes its dtype.
    """
    batch = _running.batch
    assert batch is not None, "only an engine's forward runs with it"
    if attention_mask is not None or position_bias is not None or is_causal is False or len(query) != 1:
        raise TypeError("its attention has masks of its own")
    if not query.dtype == key.dtype == value.dtype or query.shape[1] % key.shape[1]:
        raise TypeError("its queries, keys and values do not fit together")
    layer = _running.cache.take_new(key, sliding_window or 0)
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    softmax = Softmax(scaling, sliding_window or 0, softcap or 0.0, s_aux)
    query, key, value = (rows if rows.stride(3) == 1 else rows.contiguous() for rows in (query, key, value))
    if layer.by_heads:
        run = attention_kernel(query.dtype)
        assert run is not None, "its layout is the kernel's"
        out = c_kernel.attend(run, batch, layer, query, key, value, softmax)
    elif _running.batch_invariant:
        raise UnsupportedModelError(f"batch_invariant needs the attention kernel, which does not take {query.dtype}")
    else:
        out = _attend_in_parts(batch, layer, query, key, value, softmax)
    shown = module.__dict__.get(ROWS)  # a missing attribute would cost a search in torch
    if shown is None:
        return out[None], None
    return out[None], reference.shown_patterns(batch, shown, layer, query, softmax, _running.batch_invariant)


AttentionInterface.register(NAME, _attend)


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
