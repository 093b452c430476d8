"""The attention kernel gives each row the same bits alone and in any batch, however it divides heads among threads."""

from __future__ import annotations

import pytest
import torch

from deployments.model import attention
from deployments.model.kv_cache import PAGE, Packed, PagedCache, SequenceKv, TokenSpan
from deployments.model.native import attention_kernel

SIZE = 24
SPANS = [(70, 1), (3, 1), (0, 1), (0, 40), (100, 3), *((20 + n, 1) for n in range(12))]  # (start, tokens)


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
        keys, values = attention._gathered(layer, span, SIZE)
        reads = attention._reads(span, window, keys.device)
        rows_of = slice(first, first + span.count)
        wanted = attention._products(query[:, :, rows_of], keys[None], values[None], reads, softmax)[0].transpose(0, 1)
        torch.testing.assert_close(together[rows_of], wanted)
        for row in range(span.count):
            one = attend([TokenSpan(span.kv, span.start + row, 1)], first + row, 1)
            assert torch.equal(one[0], together[first + row])
        first += span.count
