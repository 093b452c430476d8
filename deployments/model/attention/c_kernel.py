"""Attention on a CPU by the compiled kernel, `paged_attention.c`."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from typing import Any

import torch

from deployments.model.attention.softmax import Softmax
from deployments.model.batch import Batch
from deployments.model.kv_cache import LayerPages
from deployments.model.native import Call, worthwhile_threads

THREAD_PRODUCTS = 500_000  # about 30 microseconds of a thread


def attend(
    run: Callable[[Any], int],
    batch: Batch,
    layer: LayerPages,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """Write the rows' keys and values to their pages, and attend; returns [rows, heads, features].

    Args:
        run: The kernel for this dtype.
        batch: The rows.
        layer: The layer's pages, in the kernel's layout.
        query: [1, heads, rows, head_dim], like key and value with any strides but a last one of 1.
        key: [1, kv_heads, rows, head_dim].
        value: [1, kv_heads, rows, features].
        softmax: The parameters of the softmax.

    Raises:
        MemoryError: There is no memory for the products.
    """
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
        *(softmax.window, worthwhile_threads(batch.reads * heads * (size + width), THREAD_PRODUCTS)),
        *(softmax.scaling, softmax.softcap),
    )
    if run(byref(call)):
        raise MemoryError("not enough memory for attention's products")
    return out
