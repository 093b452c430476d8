"""Attention of prompts on a GPU by torch's flash attention, all of them in one call."""

from __future__ import annotations

import functools
import inspect
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from deployments.model.attention.softmax import Softmax
from deployments.model.batch import PAGE, Batch, uploaded
from deployments.model.kv_cache import LayerPages

_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


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
    """A batch's prompts."""

    starts: torch.Tensor  # [spans + 1] int32 the first row of each, counted from the first prompt's, and their number
    key_starts: torch.Tensor  # [spans + 1] int32 the same of the keys that they read
    longest: int  # the most tokens of a span
    most_keys: int
    keys: tuple[torch.Tensor, ...]  # the page and offset of each key, int32; empty if all keys are of these rows


def _prompts(batch: Batch, device: torch.device) -> _Prompts:
    spans = batch.spans[batch.singles :]
    counts, stops = [span.count for span in spans], [span.start + span.count for span in spans]
    arrays = [np.cumsum([0, *counts]), np.cumsum([0, *stops])]
    if stops != counts:
        positions = [np.arange(stop) for stop in stops]
        pages = [np.asarray(span.kv.pages)[at // PAGE] for span, at in zip(spans, positions, strict=True)]
        arrays += [np.concatenate(pages), np.concatenate(positions) % PAGE]
    sizes = [len(array) for array in arrays]
    starts, key_starts, *keys = torch.split(uploaded(np.concatenate(arrays).astype(np.int32), device), sizes)
    return _Prompts(starts, key_starts, max(counts), max(stops), tuple(keys))


def attend_prompts(
    batch: Batch,
    layer: LayerPages,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax: Softmax,
    out: torch.Tensor,
) -> None:
    """Write the attention of a batch's prompts to `out` [rows, heads, features].

    Arguments are as for `c_kernel.attend`, but the rows' keys and values are in their pages.
    """
    prompts: _Prompts = batch.table(("prompts", query.device), partial(_prompts, batch, query.device))
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
        **_GROUPED,
    )
    out[first:] = attended
