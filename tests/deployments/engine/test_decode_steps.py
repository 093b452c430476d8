"""Decode steps with memory at fixed addresses, as CUDA graphs replay them, run here without a graph.

They give what eager steps give: the same bits as an eager step of as many rows, and with a batch-invariant model in any
schedule, also where each step is launched before the tokens of the last are known.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine import decode_steps, runner
from deployments.engine.edits import PAIRED, Edit, Norms, Report
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Finished, Request, Sampling
from deployments.model.batch import PAGE, Batch
from deployments.model.model import Model
from deployments.points.capture import Capture
from deployments.points.token_choices import Tokens
from tests.deployments.engine.host_syncs import HostSyncs

pytestmark = pytest.mark.cpu

EXAMPLES = settings().max_examples // 5  # of schedules, for each model
WAYS = ("plain", "layers", "one", "steered", "drawn", "lens", "penalized", "last", "heads")


def request(model, way, number, prompt, new):
    points = {
        "layers": ["layers.*.output"],
        "one": ["layers.1.mlp.output", "lm_head.output"],
        "last": ["layers.2.output"],
        "heads": ["layers.*.attention.q", "layers.*.attention.k"],
    }
    asked = Request(str(number), prompt, new, ignore_eos=number % 2 == 0, logprobs=3 if number % 3 == 0 else None)
    if way in points:
        capture = {"points": points[way], "tokens": {"last": 3} if way == "last" else "all"}
        capture |= {"heads": [1, 0]} if way == "heads" else {}
        wanted = Capture.model_validate(capture)
        return replace(asked, capture=wanted, points=model.points.resolve(wanted))
    if way == "steered":
        name = "layers.1.attention.k" if number % 2 else "layers.1.output"
        (point,) = model.points.named(name, "points")
        vector = torch.randn(point.shape, generator=torch.Generator().manual_seed(number))
        kinds = [("add", {}), ("add_norm", {"norms": Norms()}), ("scale", {"low": 0.5}), ("ablate", {})]
        kinds += [("clamp", {"low": -0.2, "high": 0.3, "features": (5, 0, 3)}), ("replace", {})]
        kinds += [("clamp_projection", {"low": -0.2, "high": 0.3}), ("mix", {"low": 0.3})]
        kinds += [("rotate", {"low": -0.5, "high": 0.9}), ("project_out", {})]
        kind, more = kinds[number % len(kinds)]
        given = None if kind in ("scale", "clamp") else torch.cat([vector, -vector], -1) if kind in PAIRED else vector
        edit = Edit(point, kind, Tokens(number % 9), vector=given, report=Report(), **more)
        return replace(asked, edits=(edit,))
    if way == "drawn":
        return replace(asked, sampling=Sampling(1.0, top_p=0.9, seed=number, min_tokens=min(2, new)))
    if way == "penalized":
        return replace(asked, sampling=Sampling(0.0, repetition_penalty=1.3))
    return asked


def outcome(done, edits):
    """Tokens, reason, logprobs, rows and effects of a request."""
    logprobs = [(one.logprob, one.top) for one in (done.rest.logprobs if done.rest else ())]
    rows = (
        {name: value.view(torch.uint8).tolist() for name, value in done.captured.values.items()} if done.captured else 0
    )
    effects = [(edit.report.values, edit.norms.values if edit.norms else 0) for edit in edits]
    return list(done.tokens), done.reason, done.error, logprobs, rows, effects


def served(engine, requests, cancelled, every):
    """The outcome of each request; every few steps one more arrives, and some are cancelled after as many steps."""
    waiting, done, step = list(requests), {}, 0
    while len(done) < len(requests):
        if waiting and step % every == 0:
            engine.submit(replace(waiting.pop(0), streamed=False))
        if step in cancelled:
            engine.cancel(str(cancelled[step]))
        step += 1
        for event in engine.step():
            if isinstance(event, Finished):
                done[event.id] = event
    return done


SCHEDULES = {
    "lengths": st.lists(
        st.tuples(st.sampled_from(WAYS), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=9
    ),
    "max_running": st.integers(1, 9),
    "every": st.integers(1, 3),
    "cancelled": st.dictionaries(st.integers(0, 30), st.integers(0, 8), max_size=2),
}


def made(model, lengths, prompt):
    return [request(model, way, i, prompt(length, i), new) for i, (way, length, new) in enumerate(lengths)]


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mistral", "qwen3_next"])
def test_a_step_has_the_bits_of_an_eager_one_of_as_many_rows(name, tiny, prompt):
    model = tiny(name)

    def eager(ids, spans, wanted, device):
        """Padded as a decode step is."""
        decodes = len(ids) == len(spans) and wanted is None and len(ids) > 0
        rows = decode_steps.padded(len(ids)) if decodes else 0
        return Batch(ids, spans, wanted, device, padded=rows, padding_page=memory.padding_page)

    @settings(max_examples=EXAMPLES)
    @given(**SCHEDULES)
    def any_schedule(lengths, max_running, every, cancelled):
        nonlocal memory
        lengths = [(way, length + 1, new) for way, length, new in lengths]  # a prompt of one token is no decode step
        ours, theirs = made(model, lengths, prompt), made(model, lengths, prompt)
        with pytest.MonkeyPatch.context() as patch:
            plain = Engine(model, max_running=max_running)
            memory = plain._memory
            patch.setattr(runner, "Batch", eager)
            want = served(plain, theirs, cancelled, every)
        engine = Engine(model, max_running=max_running, fixed_memory=True)
        engine._output.may_run_ahead = lambda _: False
        got = served(engine, ours, cancelled, every)
        for mine, other in zip(ours, theirs, strict=True):
            assert outcome(got[mine.id], mine.edits) == outcome(want[other.id], other.edits)

    memory = None
    any_schedule()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def invariant(request, build, byte_tokenizer):
    model = build("qwen3").to(getattr(torch, request.param))
    return Model(model, byte_tokenizer, "qwen3", batch_invariant=True)


@settings(max_examples=EXAMPLES)
@given(**SCHEDULES, pages=st.sampled_from([8, 14, 200]), threaded=st.booleans())
def test_steps_launched_ahead_give_any_request_what_it_gets_alone(
    invariant, prompt, lengths, max_running, every, pages, threaded, cancelled
):
    ours, theirs = made(invariant, lengths, prompt), made(invariant, lengths, prompt)
    kv_bytes = pages * PAGE * KvMemory(invariant, 1, kv_bytes=1).position_bytes
    engine = Engine(invariant, max_running=max_running, kv_bytes=kv_bytes, fixed_memory=True, capture_thread=threaded)
    got = served(engine, ours, cancelled, every)
    alone = Engine(invariant, max_running=1)
    for mine, other in zip(ours, theirs, strict=True):
        (want,) = alone.generate([other])
        if got[mine.id].reason == "cancelled":
            assert list(got[mine.id].tokens) == list(want.tokens)[: len(got[mine.id].tokens)]
            continue
        assert outcome(got[mine.id], mine.edits) == outcome(want, other.edits)


@pytest.mark.parametrize("way", ["plain", "layers", "heads", "steered", "drawn"])
def test_a_step_waits_for_the_device_once(way, tiny, prompt):
    model = tiny("qwen3")
    engine = Engine(model, fixed_memory=True)
    for number in range(3):
        engine.submit(request(model, way, number, prompt(9, number), 30))
    for _ in range(5):
        engine.step()
    with HostSyncs() as syncs:
        engine.step()
    assert len(syncs.seen) <= 1, syncs.seen


def test_edits_of_any_number_of_rows_share_one_plan_and_plans_take_bounded_memory(tiny, prompt, monkeypatch):
    model = tiny("qwen3")
    engine = Engine(model, fixed_memory=True)
    engine.generate([request(model, "steered", number, prompt(9), 4 + number) for number in (0, 10, 20)])
    steps = engine._runner._steps._steps
    (first,) = {step.plan for step in steps.values()}
    assert {step.rows for step in steps.values()} == {1, 2, 4}
    monkeypatch.setattr(decode_steps, "MOST_PLAN_BYTES", first.bytes)
    engine.generate([request(model, "steered", 1, prompt(9), 4)])  # an edit of another kind
    assert first not in {step.plan for step in steps.values()}


@pytest.mark.parametrize(("dtype", "captured"), [("float32", True), ("float16", False)])
def test_a_step_whose_attention_reads_tables_of_the_host_is_not_captured(
    dtype, captured, build, byte_tokenizer, prompt, monkeypatch
):
    """A graph would read those of the batch of its capture for ever."""
    model = Model(build("qwen3").to(getattr(torch, dtype)), byte_tokenizer, "qwen3")
    engine, tried = Engine(model, fixed_memory=True), []
    engine._runner._steps._graphs = True
    monkeypatch.setattr(decode_steps.DecodeSteps, "_capture", lambda _, step, batch: tried.append(step))
    engine.generate([request(model, "plain", 0, prompt(9), 9)])
    assert bool(tried) == captured


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize("sound", [True, False])
def test_a_replayed_graph_reads_what_is_new_and_one_with_other_logits_is_not_used(
    sound, name, tiny, prompt, monkeypatch, caplog
):
    """A stand-in for a graph runs the step again, with the batch and the memory of its capture."""
    model, replays = tiny(name), []

    def capture(steps, step, batch):
        def replay():
            replays.append(step)
            logits.copy_(steps._forward(step, batch) if sound else torch.zeros_like(logits))

        logits = torch.empty(step.rows, model.vocabulary)
        step.captured = SimpleNamespace(replay=replay), logits

    monkeypatch.setattr(decode_steps.DecodeSteps, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    ours, theirs = ([request(model, way, 2, prompt(9), 20) for way in ("plain", "layers", "steered")] for _ in range(2))
    engine = Engine(model, fixed_memory=True)
    engine._runner._steps._graphs = True
    for mine, other in zip(ours, theirs, strict=True):
        (got,), (want,) = engine.generate([mine]), Engine(model).generate([other])
        assert outcome(got, mine.edits) == outcome(want, other.edits)
    assert (len(replays) > 40) == sound
    assert ("its logits differ" in caplog.text) != sound
