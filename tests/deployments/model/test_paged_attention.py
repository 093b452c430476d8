"""The attention kernel gives each row the same bits alone and in any batch, however it divides heads among threads."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
import torch
from torch.nn import functional

from deployments.model import kv_cache
from deployments.model.attention import flash, reference, registration
from deployments.model.attention.reference import Softmax
from deployments.model.batch import PAGE, Batch, SequenceKv, TokenSpan
from deployments.model.kv_cache import PagedCache
from deployments.model.native import attention_kernel

SIZE = 24
SPANS = [(70, 1), (3, 1), (0, 1), (0, 40), (100, 3), *((20 + n, 1) for n in range(12))]  # (start, tokens)
LIMITS = [(0, 0), (19, 0), (0, 19)]  # (window, chunk)

pytestmark = pytest.mark.cpu


def random_rows(lengths, heads, kv_heads):
    """Spans of (start, tokens), a layer of pages before them, and their query, key and value."""
    pages = iter(range(64))
    spans = [TokenSpan(SequenceKv([*islice(pages, -(-(start + n) // PAGE))]), start, n) for start, n in lengths]
    query, key, value = (torch.randn(1, of, sum(n for _, n in lengths), SIZE) for of in (heads, kv_heads, kv_heads))
    cache = PagedCache(64)
    cache.update(key, value, 0)
    layer = cache.pages_for(key, value, 0)
    layer.keys.normal_()
    layer.values.normal_()
    return spans, layer, (query, key, value)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("window", "chunk"), LIMITS)
@pytest.mark.parametrize(("kv_heads", "group"), [(5, 9), (4, 2), (1, 1)])
def test_a_row_alone_has_the_bits_that_it_has_beside_others(kv_heads, group, window, chunk, monkeypatch):
    if attention_kernel(torch.float32) is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(registration, "THREAD_PRODUCTS", 1)  # as many threads as there are, for any number of products
    torch.manual_seed(0)
    sinks = torch.randn(kv_heads * group)
    softmax = Softmax(0.2, window, 0.0, sinks, chunk)
    spans, layer, tensors = random_rows(SPANS, kv_heads * group, kv_heads)
    rows = sum(span.count for span in spans)

    def attend(of: list[TokenSpan], first: int, count: int) -> torch.Tensor:
        parts = (tensor[:, :, first : first + count].contiguous() for tensor in tensors)
        batch = Batch([0] * count, of, None, torch.device("cpu"))
        return registration.by_c_kernel(batch, layer, *parts, softmax)

    together, wanted, first = attend(spans, 0, rows), torch.empty(rows, kv_heads * group, SIZE), 0
    batch = Batch([0] * rows, spans, None, torch.device("cpu"))
    reference.attend(batch, range(len(spans)), layer, tensors[0], softmax, wanted)
    torch.testing.assert_close(together, wanted)
    for span in spans:
        for row in range(span.count):
            one = attend([TokenSpan(span.kv, span.start + row, 1)], first + row, 1)
            assert torch.equal(one[0], together[first + row])
        first += span.count


@pytest.mark.parametrize(("window", "chunk"), LIMITS)
def test_prompts_in_one_call_get_what_each_gets_alone(window, chunk, monkeypatch):
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
    softmax = Softmax(0.2, window, 0.0, None, chunk)
    monkeypatch.setattr(kv_cache, "attention_kernel", lambda _: None)
    spans, layer, rows = random_rows([(30, 1), (0, 40), (100, 3), (0, 17)], 4, 2)
    batch = Batch([0] * sum(span.count for span in spans), spans, None, torch.device("cpu"))
    alone = registration._attend_in_parts(batch, layer, *rows, softmax)
    monkeypatch.setattr(flash, "varlen_attn", varlen)
    monkeypatch.setattr(flash, "takes", lambda *_: True)
    torch.testing.assert_close(registration._attend_in_parts(batch, layer, *rows, softmax), alone)
