"""Kernels in Triton for a GPU: attention of single decoded rows, and RMS norms. Not run on a GPU yet.

Imports Triton, which installations for CPUs lack: get the module by `native.triton_kernels`. What a model fixes is a
constant of the compiled code. What changes from call to call is not, and Triton does not specialize the code for it.
"""

from __future__ import annotations

import subprocess

import triton
import triton.language as tl

# Why a kernel cannot be compiled or started: Triton's own errors, no driver, no C compiler, too little shared memory.
FAILURES = (triton.TritonError, RuntimeError, OSError, subprocess.SubprocessError, AssertionError, ImportError)

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _logits(products: tl.tensor, scaling: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Logits to base 2, for which a GPU has an instruction."""
    x = products * scaling
    if SOFTCAP > 0:
        x = SOFTCAP * (2 * tl.sigmoid(2 * x / SOFTCAP) - 1)  # tanh
    return x * LOG2E


@triton.jit
def _finite(top: tl.tensor) -> tl.tensor:
    """A maximum to subtract: where nothing was read it is -inf, and -inf - -inf is NaN."""
    return tl.where(top == LOWEST, 0.0, top)


@triton.jit(do_not_specialize=["window", "chunk"], do_not_specialize_on_alignment=["position", "start", "pages"])
def decode(
    query: tl.tensor,  # [rows, heads, dim]
    key: tl.tensor,  # [rows, kv_heads, dim]
    value: tl.tensor,  # [rows, kv_heads, width]
    keys: tl.tensor,  # [pages, PAGE, kv_heads, dim]
    values: tl.tensor,  # [pages, PAGE, kv_heads, width]
    position: tl.tensor,  # [rows]
    start: tl.tensor,  # [rows]
    pages: tl.tensor,
    sinks: tl.tensor,  # [heads], or None
    out: tl.tensor,  # [rows, heads, splits, width]: float32 sums of each split, or with one split the result
    state: tl.tensor,  # [rows, heads, splits, 2]: a split's largest logit and sum of weights; None with one split
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    window: tl.tensor,
    chunk: tl.tensor,
    scaling: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> None:
    """Up to BLOCK_HEADS heads of one row over one split of its keys; the last split takes the row's own key, too.

    The program that takes the row's own key also writes it and its value into their page. No program reads that place:
    others may run before or after it. Grid: (rows, kv_heads * blocks of heads, splits).
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS  # heads that share a key head
    BLOCKS: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    row = tl.program_id(0).to(tl.int64)
    kv_head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    split, splits = tl.program_id(2), tl.num_programs(2)
    at = tl.load(position + row)
    begin = tl.load(start + row)

    of_group = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head, is_head = kv_head * GROUP + of_group, of_group < GROUP
    d, w = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_WIDTH)
    has_d, has_w = d < DIM, w < WIDTH
    places = query + row * query_row + head[:, None] * query_head + d[None, :]
    q = tl.load(places, mask=is_head[:, None] & has_d[None, :], other=0.0)

    top = tl.full([BLOCK_HEADS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, BLOCK_WIDTH], tl.float32)
    if split == splits - 1:
        own_key = tl.load(key + row * key_row + kv_head * key_head + d, mask=has_d, other=0.0)
        own_value = tl.load(value + row * value_row + kv_head * value_head + w, mask=has_w, other=0.0)
        if block == 0:
            own_page = tl.load(pages + begin + at // PAGE).to(tl.int64)
            slot = (own_page * PAGE + at % PAGE) * KV_HEADS + kv_head
            tl.store(keys + slot * DIM + d, own_key, mask=has_d)
            tl.store(values + slot * WIDTH + w, own_value, mask=has_w)
        products = tl.sum(q.to(tl.float32) * own_key.to(tl.float32)[None, :], 1)
        top = _logits(products, scaling, SOFTCAP)
        total += 1.0
        if sinks is not None:
            own = top
            sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * LOG2E
            top = tl.maximum(own, sink)
            total = tl.exp2(own - top)
            acc += total[:, None] * own_value.to(tl.float32)[None, :]
            total += tl.exp2(sink - top)
        else:
            acc += own_value.to(tl.float32)[None, :]

    first = tl.maximum(at - window + 1, at // chunk * chunk)
    low = first // BLOCK_KEYS
    tiles = tl.cdiv(at, BLOCK_KEYS) - low
    each = tl.cdiv(tiles, splits)
    for tile in range(low + split * each, low + tl.minimum(split * each + each, tiles)):
        n = tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        read = (n >= first) & (n < at)
        page = tl.load(pages + begin + n // PAGE, mask=read, other=0).to(tl.int64)
        slots = (page * PAGE + n % PAGE) * KV_HEADS + kv_head
        k = tl.load(keys + slots[:, None] * DIM + d[None, :], mask=read[:, None] & has_d[None, :], other=0.0)
        logits = _logits(tl.dot(q, tl.trans(k), input_precision="ieee"), scaling, SOFTCAP)
        logits = tl.where(read[None, :], logits, LOWEST)
        higher = tl.maximum(top, tl.max(logits, 1))
        shrink = tl.exp2(top - _finite(higher))
        weights = tl.exp2(logits - _finite(higher)[:, None])
        v = tl.load(values + slots[:, None] * WIDTH + w[None, :], mask=read[:, None] & has_w[None, :], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher

    cell = (row * HEADS + head) * splits + split
    if state is None:
        acc = acc / total[:, None]
    else:
        tl.store(state + 2 * cell, top, mask=is_head)
        tl.store(state + 2 * cell + 1, total, mask=is_head)
    places = out + cell[:, None] * WIDTH + w[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=is_head[:, None] & has_w[None, :])


@triton.jit(do_not_specialize=["splits"])
def join(
    partial: tl.tensor,  # [cells, splits, width]: `out` of `decode`
    state: tl.tensor,  # [cells, splits, 2]
    out: tl.tensor,  # [cells, width]
    splits: tl.tensor,
    WIDTH: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
) -> None:
    """The result of one row and head, of its splits' sums. Grid: (rows * heads,)."""
    cell = tl.program_id(0).to(tl.int64)
    split, w = tl.arange(0, MOST_SPLITS), tl.arange(0, BLOCK_WIDTH)
    has_split, has_w = split < splits, w < WIDTH
    at = cell * splits + split
    top = tl.load(state + 2 * at, mask=has_split, other=LOWEST)
    total = tl.load(state + 2 * at + 1, mask=has_split, other=0.0)
    acc = tl.load(partial + at[:, None] * WIDTH + w[None, :], mask=has_split[:, None] & has_w[None, :], other=0.0)
    share = tl.exp2(top - _finite(tl.max(top, 0)))
    result = tl.sum(acc * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + cell * WIDTH + w, result.to(out.dtype.element_ty), mask=has_w)


@triton.jit(do_not_specialize=["rows"])
def rms_norm(
    x: tl.tensor,  # [rows, size]
    scale: tl.tensor,  # [size] float32
    out: tl.tensor,  # [rows, size]
    rows: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """BLOCK_ROWS rows over the root of their mean square, times the scale; ROUNDED to the dtype in between."""
    row, d = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_SIZE)
    there = (row < rows)[:, None] & (d < SIZE)[None, :]
    at = row.to(tl.int64)[:, None] * SIZE + d[None, :]
    numbers = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(numbers * numbers, 1) / SIZE
    numbers *= tl.rsqrt(mean + eps)[:, None]
    if ROUNDED:
        numbers = numbers.to(x.dtype.element_ty).to(tl.float32)
    numbers *= tl.load(scale + d, mask=d < SIZE, other=0.0)[None, :]
    tl.store(out + at, numbers.to(out.dtype.element_ty), mask=there)
