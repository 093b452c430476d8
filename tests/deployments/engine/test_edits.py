"""Edits in a batch: several of a row, of parts of it, of single tokens, and no effect on other requests."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from by_hand import hooked
from by_hand import point as point_of

from deployments.engine import sequence
from deployments.engine.edit_plans import Plan
from deployments.engine.edits import Edit, Norms, Tokens
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Request
from deployments.engine.scheduler import Chunk
from tests.deployments.conftest import DEVICE

PROMPT, NEW = 9, 6


def vector(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def edited(model, id, prompt, edits, capturing=None, **fields):
    request = capturing(model, id, prompt, NEW, points=sorted({e.point.name for e in edits}))
    return replace(request, edits=tuple(edits), ignore_eos=True, **fields)


def check(model, request, done, assert_rows_close):
    """What was generated and recorded is that of one forward with the edits by hand."""
    tokens = [*request.prompt, *done.tokens]
    logits, values = hooked(model, tokens, request.edits)
    for name, want in values.items():
        assert_rows_close(done.captured.values[name], want, f"{request.id}: {name}", 1e-3)
    for i, token in enumerate(done.tokens):
        row = logits[len(request.prompt) - 1 + i]
        assert row[token] >= row.max() - 1e-3, f"{request.id}: token {i}"


def test_several_edits_come_in_their_order_of_some_features_and_heads(tiny, prompt, capturing, assert_rows_close):
    model = tiny("qwen3")
    hidden, heads = point_of(model, "layers.0.output"), point_of(model, "layers.1.attention.heads")
    size, (count, width) = hidden.shape[0], heads.shape
    edits = [
        Edit(hidden, "add", vector=vector(size)),
        Edit(hidden, "scale", low=0.5, features=(0, 3, 5)),
        Edit(hidden, "add", vector=vector(3), features=(2, 1, 0), tokens=Tokens(PROMPT)),
        Edit(heads, "scale", low=0.0, heads=(1,)),
        Edit(heads, "add", vector=vector(width), heads=(0, count - 1), tokens=Tokens(0, PROMPT)),
        Edit(heads, "project_out", vector=vector(2), features=(1, 2), heads=(0,)),
    ]
    orders = [edits, edits[::-1], edits[1:] + edits[:1]]
    requests = [edited(model, str(i), prompt(PROMPT, i), order, capturing) for i, order in enumerate(orders)]
    for request, done in zip(requests, Engine(model).generate(requests), strict=True):
        check(model, request, done, assert_rows_close)


def test_one_vector_for_all_heads_and_others_for_each_share_a_batch(tiny, prompt, capturing, assert_rows_close):
    model = tiny("qwen3")
    at = point_of(model, "layers.1.attention.heads")
    count, width = at.shape
    vectors = [vector(width), vector(count * width, 1).view(count, width)]
    edits = [Edit(at, kind, vector=v) for v in vectors for kind in ("add", "replace")]
    rows = vector(PROMPT * count * width, 2).view(PROMPT, count, width)
    edits += [
        Edit(at, "replace", Tokens(0, PROMPT), vector=rows.double()),
        Edit(at, "replace", Tokens(0, PROMPT), heads=(2, 0), vector=rows[:, :2].bfloat16()),
    ]
    requests = [edited(model, str(i), prompt(PROMPT, i), [edit], capturing) for i, edit in enumerate(edits)]
    for request, done in zip(requests, Engine(model).generate(requests), strict=True):
        check(model, request, done, assert_rows_close)


def test_each_token_may_be_replaced_by_its_own(tiny, prompt, capturing, assert_rows_close):
    model = tiny("llama")
    at = point_of(model, "layers.1.output")
    rows = torch.randn(PROMPT + 2, *at.shape, device=DEVICE)
    few = Edit(at, "replace", tokens=Tokens(few=(2, PROMPT, PROMPT + 2)), vector=rows[:3])
    whole = Edit(at, "replace", tokens=Tokens(1, PROMPT), vector=rows[3:])
    requests = [edited(model, str(i), prompt(PROMPT, i), [edit], capturing) for i, edit in enumerate((few, whole))]
    for request, done in zip(requests, Engine(model, prefill_tokens=5).generate(requests), strict=True):
        check(model, request, done, assert_rows_close)


def test_neighbours_keep_every_bit_whatever_is_done_beside_them(tiny, prompt, capturing):
    model = tiny("qwen3")
    at = point_of(model, "layers.0.output")
    plain = [capturing(model, f"plain {i}", prompt(5 + i), NEW, points=["lm_head.output"]) for i in range(3)]
    others = [Request(f"other {i}", prompt(7 + i, 1), NEW, ignore_eos=True) for i in range(3)]
    steered = [
        replace(other, edits=(Edit(at, "add", vector=vector(at.shape[0]) * strength),))
        for other, strength in zip(others, (1.0, 30.0, 1e4), strict=True)
    ]
    quiet = Engine(model).generate([*plain, *others])[:3]
    beside = Engine(model).generate([*plain, *steered])[:3]
    for a, b in zip(quiet, beside, strict=True):
        assert a.tokens == b.tokens
        assert torch.equal(a.captured.values["lm_head.output"], b.captured.values["lm_head.output"])


def test_patching_a_run_into_itself_changes_nothing_and_the_clean_run_into_another_gives_the_clean_logits(
    tiny, prompt, capturing
):
    model = tiny("qwen3")
    layers = [point_of(model, f"layers.{i}.output") for i in range(model.points.layer_count)]
    names = [*(layer.name for layer in layers), "lm_head.output"]
    clean, corrupted = prompt(PROMPT, 1), prompt(PROMPT, 2)
    (run,) = Engine(model).generate([capturing(model, "clean", clean, 1, points=names)])

    def patched(tokens):
        rows = [run.captured.values[layer.name][:PROMPT].to(DEVICE) for layer in layers]
        edits = tuple(
            Edit(layer, "replace", tokens=Tokens(0, PROMPT), vector=own)
            for layer, own in zip(layers, rows, strict=True)
        )
        (done,) = Engine(model).generate([replace(capturing(model, "p", tokens, 1, points=names), edits=edits)])
        return done.captured.values["lm_head.output"][:PROMPT]

    want = run.captured.values["lm_head.output"][:PROMPT]
    assert torch.equal(patched(clean), want)
    torch.testing.assert_close(patched(corrupted), want, rtol=1e-5, atol=1e-5)


def test_a_request_that_loses_its_slot_is_changed_in_the_same_way_again(tiny, prompt, monkeypatch):
    monkeypatch.setattr(sequence, "RESERVED_TOKENS", 1)  # so that they come to want more than there is
    model = tiny("qwen3", num_hidden_layers=2, max_position_embeddings=256)
    at = point_of(model, "layers.0.output")
    steady = Edit(at, "replace", Tokens(70), vector=5 * vector(at.shape[0]))

    def counted():
        return Edit(
            point_of(model, "layers.0.mlp.output"), "add_norm", vector=0.0 * vector(at.shape[0]), norms=Norms("counted")
        )

    requests = [
        Request(str(i), prompt(length), new, ignore_eos=True, edits=(steady, counted()))
        for i, (length, new) in enumerate([(62, 90), (58, 80)])
    ]
    tight = Engine(model, kv_bytes=208 * KvMemory(model, 1, kv_bytes=1).position_bytes)
    got = tight.generate(requests)
    assert tight.statistics.preempted > 0
    for request, done in zip(requests, got, strict=True):
        alone = replace(request, edits=(steady, counted()))
        (want,) = Engine(model).generate([alone])
        assert done.tokens == want.tokens
        assert request.edits[1].norms.median == pytest.approx(alone.edits[1].norms.median, rel=1e-6)


@pytest.mark.cpu
def test_a_vector_for_all_tokens_is_not_repeated_for_each(tiny):
    at = point_of(tiny("qwen3"), "layers.0.output")
    steering = Edit(at, "add", vector=vector(at.shape[0]))
    with torch.profiler.profile(profile_memory=True) as profiled:
        Plan([Chunk(SimpleNamespace(request=SimpleNamespace(edits=(steering,))), 0, 10_000)])
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profiled.events())
    assert taken < 100 * steering.vector.nbytes
