"""Attention of single decoded rows on a GPU, by a kernel in Triton. Not run on a GPU yet.

The sibling of `paged_attention.c`: one launch writes the rows' keys and values into their pages and attends. Nothing
that the host passes depends on lengths, so a CUDA graph of a call serves rows of any lengths.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch

from deployments.model.attention import reference
from deployments.model.attention.reference import Softmax
from deployments.model.batch import PAGE, Batch, PagePlaces, SequenceKv, TokenSpan
from deployments.model.device_memory import is_out_of_memory
from deployments.model.kv_cache import LayerPages
from deployments.model.native import triton_kernels

MOST_SPLITS = 32
LEAST = 16  # rows, columns and depth of a product by tensor cores
BLOCK_HEADS = LEAST  # of a program; the heads that share a key head are padded to a multiple
MOST_KEYS = 128  # that a program reads at once
TILE_BYTES = 32 << 10  # of keys and values that a program reads at once; it keeps two in its shared memory
NO_WINDOW = (1 << 31) - 1  # nor chunks
logger = logging.getLogger(__name__)
TRIED_AT, TRIED_WINDOW = (0, 21, 300), 250  # positions of the rows of a trial


def splits_for(rows: int, kv_heads: int, processors: int) -> int:
    """The number of programs that share a row's keys: a power of two that gives a GPU about two waves of programs."""
    splits = 1
    while splits < MOST_SPLITS and 2 * rows * kv_heads * splits < 3 * processors:
        splits *= 2
    return splits


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerPages,
    places: PagePlaces,
    softmax: Softmax,
    splits: int,
    out: torch.Tensor,
) -> None:
    """Write each row's key and value into its page, and its attention over its sequence up to itself to `out`.

    Rows may share the page and slot that they write only if their keys and values are equal, as a graph's padding is.
    The first call for a shape or dtype compiles, which takes seconds: make it before a graph is captured.

    Args:
        query: [rows, heads, dim]; like key and value with any strides but a last one of 1.
        key: [rows, kv_heads, dim].
        value: [rows, kv_heads, width].
        layer: The layer's pages, contiguous, of query's dtype.
        places: Where these rows, and maybe further ones, are in the pages.
        softmax: The parameters of the softmax.
        splits: From `splits_for`; another number rounds differently.
        out: [rows, heads, width], contiguous.
    """
    kernels = triton_kernels()
    assert kernels is not None
    assert 1 <= splits <= MOST_SPLITS
    (rows, heads, dim), (kv_heads, width) = query.shape, value.shape[1:]
    block_dim, block_width = (max(LEAST, kernels.triton.next_power_of_2(size)) for size in (dim, width))
    block_keys = TILE_BYTES // (2 * max(block_dim, block_width) * query.element_size())
    block_keys = min(max(block_keys, LEAST), MOST_KEYS)
    blocks = -(-heads // kv_heads // BLOCK_HEADS)
    partial, state = out, None
    if splits > 1:
        partial = query.new_empty(rows, heads, splits, width, dtype=torch.float32)
        state = query.new_empty(rows, heads, splits, 2, dtype=torch.float32)
    with torch.cuda.device(query.get_device()):
        kernels.decode[rows, kv_heads * blocks, splits](
            *(query, key, value, layer.keys, layer.values),
            *(places.position, places.start, places.pages, softmax.sinks, partial, state),
            *(stride for tensor in (query, key, value) for stride in tensor.stride()[:2]),
            *(
                softmax.window or NO_WINDOW,
                softmax.chunk or NO_WINDOW,
                softmax.scaling,
                heads,
                kv_heads,
                dim,
                width,
                softmax.softcap,
                PAGE,
            ),
            *(BLOCK_HEADS, block_dim, block_width, block_keys),
            num_warps=4,
            num_stages=5,  # two tiles, as page numbers take stages, too
            enable_fp_fusion=True,
        )
        if state is not None:
            kernels.join[(rows * heads,)](
                *(partial, state, out, splits, width, MOST_SPLITS, block_width), enable_fp_fusion=True
            )


def takes(query: torch.Tensor, key: torch.Tensor, width: int, softmax: Softmax) -> bool:
    """Whether the kernel takes single rows like these, as a trial before the first of their kind shows."""
    (_, heads, _, dim), has_sinks = query.shape, softmax.sinks is not None
    kind = Kind(query.device, query.dtype, heads, key.shape[1], dim, width, softmax.softcap, has_sinks)
    return query.is_cuda and unusable(kind) is None


class Kind(NamedTuple):
    """What the kernel is compiled for."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    width: int
    softcap: float = 0.0
    has_sinks: bool = False


@functools.cache
def unusable(kind: Kind) -> str | None:
    """Why `decode_attention` cannot serve a kind of attention; None if it gives torch's numbers when tried.

    The trial compiles, for some seconds.
    """
    if (kernels := triton_kernels()) is None:
        return "Triton is not installed"
    try:
        reason = next((f"its {wrong} are not torch's" for splits in (1, 4) if (wrong := _trial(kind, splits))), None)
    except kernels.FAILURES as error:
        if is_out_of_memory(error):
            raise
        reason = f"it does not run: {error}"
    if reason:
        logger.warning("torch's attention and no CUDA graphs run decodes, without the kernel in Triton: %s", reason)
    return reason


@torch.inference_mode()
def _trial(kind: Kind, splits: int) -> str | None:
    """What differs from torch's operations for rows of several lengths; unread memory holds NaN."""
    rows, of_row, sizes = len(TRIED_AT), max(TRIED_AT) // PAGE + 1, (kind.dim, kind.width)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kind.device, kind.dtype)

    pages = torch.randperm(rows * of_row, generator=generator).view(rows, of_row)
    spans = [TokenSpan(SequenceKv(own), at, 1) for own, at in zip(pages.tolist(), TRIED_AT, strict=True)]
    batch = Batch([0] * rows, spans, None, kind.device)
    query, key, value = random(rows, kind.heads, kind.dim), *(random(rows, kind.kv_heads, size) for size in sizes)
    keys, values = (random(rows * of_row, PAGE, kind.kv_heads, size) for size in sizes)
    at, n = torch.tensor(TRIED_AT)[:, None], torch.arange(of_row * PAGE)
    unread = torch.empty(rows * of_row, PAGE, dtype=torch.bool)
    unread[pages] = ((n >= at) | (n <= at - TRIED_WINDOW)).view(rows, of_row, PAGE)
    for part in (keys, values):
        part[unread.to(kind.device)] = torch.nan
    layer, places = LayerPages(keys.clone(), values.clone(), by_heads=False), batch.places(kind.device)
    softmax = Softmax(kind.dim**-0.5, TRIED_WINDOW, kind.softcap, random(kind.heads) if kind.has_sinks else None)
    out = query.new_empty(rows, kind.heads, kind.width)
    decode_attention(query, key, value, layer, places, softmax, splits, out)

    for part, new, found in ((keys, key, layer.keys), (values, value, layer.values)):
        part[places.page, places.offset] = new
        if not torch.allclose(found, part, rtol=0, atol=0, equal_nan=True):
            return "stored keys and values"
    wanted, in_float32 = out.new_empty(out.shape, dtype=torch.float32), LayerPages(keys.float(), values.float(), False)
    reference.attend(batch, range(rows), in_float32, query.float().transpose(0, 1)[None], softmax, wanted)
    tolerance = max(1e-4, 4 * torch.finfo(kind.dtype).eps)
    return None if torch.allclose(out.float(), wanted, rtol=tolerance, atol=tolerance) else "results"
