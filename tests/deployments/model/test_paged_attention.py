"""The attention kernel gives each row the same bits alone and in any batch, however it divides heads among threads."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
import torch
from torch.nn import functional

from deployments.model import attention
from deployments.model.kv_cache import PAGE, Packed, PagedCache, SequenceKv, TokenSpan
from deployments.model.native import attention_kernel
from deployments.model.tables import Mask, pages_of, reads, uploaded

SIZE = 24
SPANS = [(70, 1), (3, 1), (0, 1), (0, 40), (100, 3), *((20 + n, 1) for n in range(12))]  # (start, tokens)

pytestmark = pytest.mark.cpu


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("window", [0, 19])
@pytest.mark.parametrize(("kv_heads", "group"), [(5, 9), (4, 2), (1, 1)])
def test_a_row_alone_has_the_bits_that_it_has_beside_others(kv_heads, group, window, monkeypatch):
    if (run := attention_kernel(torch.float32)) is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(attention, "THREAD_PRODUCTS", 1)  # as many threads as there are, for any number of products
    torch.manual_seed(0)
    sinks = torch.randn(kv_heads * group)
    softmax = attention._Softmax(0.2, window, 0.0, sinks)
    cache, page = PagedCache(64), 0
    spans = []
    for start, count in SPANS:
        pages = range(page, page := page + -(-(start + count) // PAGE))
        spans.append(TokenSpan(SequenceKv([*pages]), start, count))
    rows = sum(count for _, count in SPANS)
    query, key, value = (torch.randn(1, heads, rows, SIZE) for heads in (kv_heads * group, kv_heads, kv_heads))
    cache.update(key, value, 0)
    layer = cache.take_new(key, window)
    layer.keys.normal_()
    layer.values.normal_()

    def attend(of: list[TokenSpan], first: int, count: int) -> torch.Tensor:
        parts = (tensor[:, :, first : first + count].contiguous() for tensor in (query, key, value))
        return attention._by_kernel(run, Packed(of), layer, *parts, softmax)

    together, first = attend(spans, 0, rows), 0
    for span in spans:
        (pages,) = uploaded([pages_of(span)], query.device)
        keys, values = attention._gathered(layer, span, pages, SIZE)
        mask = Mask(reads(span, window, query.device))
        rows_of = slice(first, first + span.count)
        wanted = attention._products(query[:, :, rows_of], keys, values, mask, softmax)[0].transpose(0, 1)
        torch.testing.assert_close(together[rows_of], wanted)
        for row in range(span.count):
            one = attend([TokenSpan(span.kv, span.start + row, 1)], first + row, 1)
            assert torch.equal(one[0], together[first + row])
        first += span.count


@pytest.mark.parametrize("window", [0, 19])
def test_prompts_in_one_call_get_what_each_gets_alone(window, monkeypatch):
    """With a stand-in for torch's function, which needs a GPU."""

    def varlen(query, keys, values, starts, key_starts, longest, most_keys, *, scale, window_size, **_):
        out = []
        for (a, b), (c, d) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
            assert b - a <= longest
            assert d - c <= most_keys
            own = torch.arange(d - c - (b - a), d - c)[:, None]
            read = (torch.arange(d - c) <= own) & (torch.arange(d - c) >= own - window_size[0] % 10**6)
            parts = (part.transpose(0, 1)[None] for part in (query[a:b], keys[c:d], values[c:d]))
            one = functional.scaled_dot_product_attention(*parts, attn_mask=read, scale=scale, enable_gqa=True)
            out.append(one[0].transpose(0, 1))
        return torch.cat(out)

    torch.manual_seed(0)
    softmax = attention._Softmax(0.2, window, 0.0, None)
    pages = iter(range(64))
    lengths = [(30, 1), (0, 40), (100, 3), (0, 17)]
    spans = [TokenSpan(SequenceKv([*islice(pages, -(-(start + n) // PAGE))]), start, n) for start, n in lengths]
    query, key, value = (torch.randn(1, heads, sum(n for _, n in lengths), SIZE) for heads in (4, 2, 2))
    cache = PagedCache(64)
    cache.update(key, value, 0)
    layer = cache.take_new(key, window)
    layer.keys.normal_()
    layer.values.normal_()
    packed = Packed(spans)
    alone = attention._by_torch(packed, layer, query, key, value, softmax)
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "_fits_flash", lambda *_: True)
    torch.testing.assert_close(attention._by_torch(packed, layer, query, key, value, softmax), alone)
