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


@pytest.fixture
def check(prompt, capturing, assert_rows_close):
    """What requests with these edits generate and record is that of one forward with the edits by hand."""

    def checked(model, *lists):
        requests = []
        for i, edits in enumerate(lists):
            points = sorted({edit.point.name for edit in edits})
            asked = capturing(model, str(i), prompt(PROMPT, i), NEW, points=points)
            requests.append(replace(asked, edits=tuple(edits), ignore_eos=True))
        for request, done in zip(requests, Engine(model, prefill_tokens=5).generate(requests), strict=True):
            logits, values = hooked(model, [*request.prompt, *done.tokens], request.edits)
            for name, want in values.items():
                assert_rows_close(done.captured.values[name], want, f"{request.id}: {name}", 1e-3)
            for i, token in enumerate(done.tokens):
                row = logits[PROMPT - 1 + i]
                assert row[token] >= row.max() - 1e-3, f"{request.id}: token {i}"

    return checked


def test_several_edits_come_in_their_order_of_some_features_and_heads(tiny, check):
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
    check(model, edits, edits[::-1], edits[1:] + edits[:1])


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


def test_a_request_that_loses_its_slot_is_changed_in_the_same_way_again(tiny, prompt, monkeypatch):
    monkeypatch.setattr(sequence, "RESERVED_TOKENS", 1)  # so that they come to want more than there is
    model = tiny("qwen3", num_hidden_layers=2, max_position_embeddings=256)
    at = point_of(model, "layers.0.output")
    steady = Edit(at, "replace", Tokens(70), vector=5 * vector(at.shape[0]))

    def counted():
        return Edit(point_of(model, "layers.0.mlp.output"), "add_norm", vector=0.0 * vector(at.shape[0]), norms=Norms())

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
        assert request.edits[1].norms.summary == pytest.approx(alone.edits[1].norms.summary, rel=1e-6)


@pytest.mark.cpu
def test_a_vector_for_all_tokens_is_not_repeated_for_each(tiny):
    at = point_of(tiny("qwen3"), "layers.0.output")
    steering = Edit(at, "add", vector=vector(at.shape[0]))
    with torch.profiler.profile(profile_memory=True) as profiled:
        Plan([Chunk(SimpleNamespace(request=SimpleNamespace(edits=(steering,))), 0, 10_000)])
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profiled.events())
    assert taken < 100 * steering.vector.nbytes
