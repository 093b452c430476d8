"""Edits in a batch: several of a row, of parts of it, of single tokens, and no effect on other requests."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch
from by_hand import hooked
from by_hand import point as point_of

from deployments.engine import sequence
from deployments.engine.edit_plans import Plan, Plans, StaticPlan, signature
from deployments.engine.edits import Edit, Norms, Report, Tokens
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Request
from deployments.engine.scheduler import Chunk
from deployments.places.hook_site import HookSite, Point
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


def test_one_vector_for_all_heads_or_tokens_and_others_for_each_share_a_batch(tiny, check):
    model = tiny("qwen3")
    hidden, at = point_of(model, "layers.1.output"), point_of(model, "layers.1.attention.heads")
    count, width = at.shape
    vectors = [vector(width), vector(count * width, 1).view(count, width)]
    rows = vector(PROMPT * count * width, 2).view(PROMPT, count, width)
    tokens = torch.randn(PROMPT + 2, *hidden.shape, device=DEVICE)
    edits = [Edit(at, kind, vector=v) for v in vectors for kind in ("add", "replace")]
    edits += [
        Edit(at, "replace", Tokens(0, PROMPT), vector=rows.double()),
        Edit(at, "replace", Tokens(0, PROMPT), heads=(2, 0), vector=rows[:, :2].bfloat16()),
        Edit(hidden, "replace", Tokens(few=(2, PROMPT, PROMPT + 2)), vector=tokens[:3]),
        Edit(hidden, "replace", Tokens(1, PROMPT), vector=tokens[3:]),
    ]
    check(model, *([edit] for edit in edits))


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


class Edited:
    """A sequence as a plan sees it."""

    acting_at = sequence.Sequence.acting_at

    def __init__(self, edits):
        self.request, self.acting = SimpleNamespace(edits=edits), None


def some_edits(seed, places):
    """Edits of every kind but of an autoencoder's features; equal ones for the same seed."""
    random, made = Random(seed), []
    for i in range(random.randint(0, 5)):
        kind = random.choice(("add", "add_norm", "scale", "project_out", "clamp", "replace", "rows"))
        at = Point("", random.choice(places), random.choice(((24,), (4, 6))))
        features, heads = random.choice((None, (5, 0, 3))), random.choice((None, (2, 0))) if at.shape[1:] else None
        first = random.randint(0, 12)
        tokens = random.choice((Tokens(), Tokens(0, first + 1), Tokens(first), Tokens(few=(first, first + 1, 15))))
        shape = (*([len(heads)] if heads else at.shape[:-1]), len(features or range(at.shape[-1])))
        shape = (30, *shape) if kind == "rows" else random.choice((shape, shape[-1:]))
        drawn = vector(math.prod(shape), seed + i).view(shape)
        if kind == "rows":
            drawn, kind = drawn.to(random.choice((torch.bfloat16, torch.float32, torch.float64))), "replace"
        kept = {"norms": Norms() if kind == "add_norm" else None, "report": random.choice((Report(), None))}
        limits = {"low": random.uniform(-1, 0), "high": random.random()}
        drawn = None if kind in ("scale", "clamp") else drawn
        made.append(Edit(at, kind, tokens, features, heads, drawn, **limits, **kept))
    return tuple(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_at_fixed_addresses_have_the_same_bits_and_numbers(dtype):
    """Rows join, leave and move; a step's numbers are kept once the next step has run; other rows keep every bit."""
    random, most, changes, as_int = Random(0), 6, 0, torch.int32 if dtype.itemsize == 4 else torch.int16
    places = [HookSite("", "output", order, "batched", (24,), dtype) for order in range(2)]
    plans, indexed, running, everyone, unkept = {}, Plans(), [], [], []
    for seed in range(0, 3000, 10):
        if len(running) < most and random.random() < 0.4:
            everyone.append([Edited(some_edits(seed, places)) for _ in range(2)])
            running.append([*everyone[-1], random.randint(0, 12)])
        running = [each for each in running if each[2] < 25 and random.random() > 0.05]
        if random.random() < 0.1:
            random.shuffle(running)
        chunks = [Chunk(of, at, 1, row) for row, (of, _, at) in enumerate(running)]
        slots = signature(chunks)
        plan = plans.setdefault(slots, StaticPlan(slots, most, torch.device(DEVICE)))
        plan.fill(chunks)
        want = indexed.of([Chunk(of, at, 1, row) for row, (_, of, at) in enumerate(running)])
        assert set(plan.places) == set(want.places)
        for place in places:
            value = vector(24 * most, seed).view(most, 24).to(dtype)[: random.randint(len(running) or 1, most)]
            value[random.randrange(len(value))] = random.choice((-0.0, math.nan))
            before, new, same = value.clone(), plan.apply(place, value), want.apply(place, value)
            assert torch.equal(value.view(as_int), before.view(as_int))
            if place in plan.places:
                changes += 1
                assert torch.equal(new.view(as_int), same.view(as_int))
        unkept.append(plan.effects())
        if len(unkept) > 1:
            unkept.pop(0).keep(range(99))
        for each in running:
            each[2] += 1
    unkept.pop().keep(range(99))
    assert changes > 300
    for mine, others in everyone:
        for a, b in zip(mine.request.edits, others.request.edits, strict=True):
            for got, expected in ((a.norms, b.norms), (a.report, b.report)):
                assert str(got and got.values) == str(expected and expected.values)
