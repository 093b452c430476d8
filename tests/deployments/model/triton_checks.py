"""What `test_triton.py` runs in a process of its own, whose Triton interprets kernels; on a GPU, with compiled ones."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from deployments.model import fast_layers
from deployments.model.attention import reference, triton_decode
from deployments.model.attention.reference import Softmax
from deployments.model.attention.triton_decode import Kind, decode_attention, unusable
from deployments.model.batch import PAGE, Batch, SequenceKv, TokenSpan
from deployments.model.kv_cache import LayerPages
from tests.deployments.model.test_norms import assert_values_and_bits

DEVICE = torch.device(os.environ.get("VITRINE_TEST_DEVICE", "cpu"))
# The interpreter computes with bfloat16's bits as if they were integers.
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else []))

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def padded(rows):
    """Rows in wider memory, as slices of one projection are."""
    wide = torch.full((len(rows), rows.shape[1] + 2, rows.shape[2] + 3), torch.nan, dtype=rows.dtype, device=DEVICE)
    wide[:, 1:-1, : rows.shape[2]] = rows
    return wide[:, 1:-1, : rows.shape[2]]


class Rows:
    """The last tokens of sequences, in shuffled pages; all memory besides holds NaN."""

    def __init__(self, lengths, heads, kv_heads, dim, width, dtype, window=0, chunk=0):
        self.limits = {"window": window, "chunk": chunk}
        self.queries = torch.randn(len(lengths), heads, dim, dtype=dtype, device=DEVICE)
        counts = [-(-length // PAGE) for length in lengths]
        pages = torch.randperm(sum(counts) + 3)[: sum(counts)].split(counts)
        self.spans = [TokenSpan(SequenceKv(own.tolist()), n - 1, 1) for own, n in zip(pages, lengths, strict=True)]
        self.sequences = [
            [torch.randn(length, kv_heads, size, dtype=dtype, device=DEVICE) for size in (dim, width)]
            for length in lengths
        ]
        self.keys, self.values = (
            torch.full((sum(counts) + 3, PAGE, kv_heads, size), torch.nan, dtype=dtype, device=DEVICE)
            for size in (dim, width)
        )
        for row, length in enumerate(lengths):
            for n in range(max(0, Softmax(1.0, **self.limits).first_key(length - 1)), length - 1):
                self.store(row, n)

    def store(self, row, n):
        page = self.spans[row].kv.pages[n // PAGE]
        self.keys[page, n % PAGE], self.values[page, n % PAGE] = (part[n] for part in self.sequences[row])

    def run(self, splits=1, softcap=0.0, sinks=None):
        """The kernel's [rows, heads, width], and torch's; it must write the rows' own places and no others."""
        own = [torch.stack([sequence[part][-1] for sequence in self.sequences]) for part in (0, 1)]
        batch, softmax = (
            Batch([0] * len(self.spans), self.spans, None, DEVICE),
            Softmax(0.3, softcap=softcap, sinks=sinks, **self.limits),
        )
        layer = LayerPages(self.keys.clone(), self.values.clone(), by_heads=False)
        out = self.values.new_empty(*self.queries.shape[:2], self.values.shape[3])
        rows = (padded(part) for part in (self.queries, *own))
        decode_attention(*rows, layer, batch.places(DEVICE), softmax, splits, out)
        for row, span in enumerate(self.spans):
            self.store(row, span.start)
        torch.testing.assert_close(layer.keys, self.keys, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(layer.values, self.values, rtol=0, atol=0, equal_nan=True)
        wanted, exact = out.double(), LayerPages(self.keys.double(), self.values.double(), by_heads=False)
        queries = self.queries.double().transpose(0, 1)[None]
        reference.attend(batch, range(len(self.spans)), exact, queries, softmax, wanted)
        return out, wanted


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 170), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 7, 8, 20]),  # the last has more heads than one program takes
    sizes=st.sampled_from([(64, 64), (80, 80), (24, 16), (16, 40)]),
    limit=st.tuples(st.sampled_from(["window", "chunk"]), st.integers(0, 180)),
    softcap=st.sampled_from([0.0, 3.0]),
    with_sinks=st.booleans(),
    splits=st.integers(1, 8),
)
def test_decoded_rows_attend_as_by_torch(lengths, kv_heads, group, sizes, limit, softcap, with_sinks, splits, dtype):
    heads = kv_heads * group
    rows = Rows(lengths, heads, kv_heads, *sizes, dtype, **dict([limit]))
    sinks = torch.randn(heads, device=DEVICE) if with_sinks else None
    out, wanted = rows.run(splits, softcap, sinks)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("splits", [1, 3])
def test_numbers_that_are_not_finite_stay_in_their_row(bad, splits):
    rows = Rows((20, 70, 33), 4, 2, 16, 16, torch.float32)
    plain, _ = rows.run(splits)
    rows.sequences[1][0][-1] = bad
    rows.sequences[1][1][3] = bad
    rows.store(1, 3)
    out, _ = rows.run(splits)
    assert torch.equal(out[::2], plain[::2])
    assert not out[1].isfinite().any()


def test_rows_that_pad_a_graph_may_share_a_page():
    rows = Rows((30, 1, 1), 4, 2, 16, 16, torch.float32)
    rows.spans[2], rows.queries[2], rows.sequences[2] = rows.spans[1], rows.queries[1], rows.sequences[1]
    out, wanted = rows.run(2)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_kernel_is_used_only_where_a_trial_gives_torchs_numbers(monkeypatch):
    kind, attend = Kind(DEVICE, torch.float32, 4, 2, 24, 16, 5.0, True), triton_decode.decode_attention
    assert unusable(kind) is None
    for wrong in ("results", "stored keys and values"):

        def spoiled(query, key, value, layer, *rest, wrong=wrong):
            attend(query, key, value, layer, *rest)
            (rest[-1] if wrong == "results" else layer.values)[:] = 0

        unusable.cache_clear()
        monkeypatch.setattr(triton_decode, "decode_attention", spoiled)
        assert unusable(kind) == f"its {wrong} are not torch's"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [LlamaRMSNorm, Gemma2RMSNorm, Olmo2RMSNorm])
def test_norms_are_those_of_the_module_and_each_rows_bits_the_same_in_any_company(make, dtype, monkeypatch):
    monkeypatch.setattr(fast_layers, "_function_for", lambda _: fast_layers._by_triton)
    assert_values_and_bits(make, dtype, DEVICE, count=20)
