"""Attention of prompts on a GPU by torch's flash attention, all of them in one call."""

from __future__ import annotations

import functools
import sys
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from deployments.model.attention.reference import Softmax
from deployments.model.batch import PAGE, Batch, uploaded
from deployments.model.kv_cache import LayerPages


def takes(query: torch.Tensor, width: int, softmax: Softmax) -> bool:
    """Whether torch's flash attention takes these rows."""
    size = query.shape[3]
    return (
        softmax.is_plain
        and query.dtype.itemsize == 2
        and width == size <= 256
        and size % 8 == 0
        and _has_flash(query.device)
    )


@functools.cache
def _has_flash(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


class _Prompts(NamedTuple):
    """A batch's prompts, each cut into its chunks."""

    starts: torch.Tensor  # [pieces + 1] int32 the first row of each, counted from the first prompt's, and their number
    key_starts: torch.Tensor  # [pieces + 1] int32 the same of the keys that they read
    longest: int  # the most tokens of a piece
    most_keys: int
    keys: tuple[torch.Tensor, ...]  # the page and offset of each key, int32; empty if all keys are of these rows


def _prompts(batch: Batch, chunk: int, device: torch.device) -> _Prompts:
    pieces = [
        (span, low, min(low + chunk, span.start + span.count))
        for span in batch.spans[batch.singles :]
        for low in range(span.start // chunk * chunk, span.start + span.count, chunk)
    ]
    counts = [stop - max(low, span.start) for span, low, stop in pieces]
    keys_of = [stop - low for _, low, stop in pieces]
    arrays = [np.cumsum([0, *counts]), np.cumsum([0, *keys_of])]
    if keys_of != counts:
        positions = [np.arange(low, stop) for _, low, stop in pieces]
        pages = [np.asarray(span.kv.pages)[at // PAGE] for (span, *_), at in zip(pieces, positions, strict=True)]
        arrays += [np.concatenate(pages), np.concatenate(positions) % PAGE]
    sizes = [len(array) for array in arrays]
    starts, key_starts, *keys = torch.split(uploaded(np.concatenate(arrays).astype(np.int32), device), sizes)
    return _Prompts(starts, key_starts, max(counts), max(keys_of), tuple(keys))


def attend_prompts(
    batch: Batch,
    layer: LayerPages,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax: Softmax,
    out: torch.Tensor,
) -> None:
    """Write the attention of a batch's prompts, whose keys and values are in their pages, to `out`.

    Shapes are as in `reference.attend`; key and value are [1, kv_heads, rows, features].
    """
    chunk = softmax.chunk or sys.maxsize
    prompts: _Prompts = batch.table(("prompts", query.device, chunk), partial(_prompts, batch, chunk, query.device))
    first = batch.singles
    keys, values = key[0, :, first:].transpose(0, 1), value[0, :, first:].transpose(0, 1)
    if prompts.keys:
        keys, values = layer.keys[prompts.keys], layer.values[prompts.keys]
    attended: Any = varlen_attn(
        query[0, :, first:].transpose(0, 1),
        keys,
        values,
        prompts.starts,
        prompts.key_starts,
        prompts.longest,
        prompts.most_keys,
        scale=softmax.scaling,
        window_size=(softmax.window - 1, 0),
        enable_gqa=True,
    )
    out[first:] = attended
