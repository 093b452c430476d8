"""Rows that another thread brings to their requests are the same rows, and the engine waits for it only for room."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from deployments.engine import output_processor, sequence
from deployments.engine.capture import ring
from deployments.engine.capture.buffer import CaptureBuffer, joined
from deployments.engine.capture.worker import Worker
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Captured, Event, Finished, Request, Rows
from deployments.model.kv_cache import PAGE
from deployments.model.model import Model
from deployments.points.patterns import Patterns

TOKENS = ["all", "all", "prompt", "generated", "last", {"last": 9}, "prompt_last", {"positions": [2, 9, 31]}]
POINTS = [
    {"points": ["layers.*.output", "layers.1.attention.heads", "lm_head.output"]},
    {"points": ["layers.1.output"], "features": {"index": [7, 0, 5]}},
    {"points": ["layers.*.attention.heads"], "heads": [3, 1]},
    {"points": ["layers.0.output", "layers.*.attention.weights"], "tokens": "all"},
]


def company(engine: Engine, requests: list[Request], numbers: random.Random) -> dict[str, tuple[Any, ...]]:
    """What each request gets where they come one after another and lose their places on the way; some are cancelled."""
    coming, parts, got = list(requests), dict[str, list[Captured]](), dict[str, tuple[Any, ...]]()
    while len(got) < len(requests):
        idle = not engine.statistics.running + engine.statistics.waiting
        if coming and (idle or numbers.random() < 0.4):
            engine.submit(coming.pop(0))
        if numbers.random() < 0.05:
            engine.cancel(f"cancelled {numbers.randrange(len(requests))}")
        if engine._scheduler.running and numbers.random() < 0.1:
            engine._recovery.preempt(numbers.choice(engine._scheduler.running))
        for event in engine.step(wait=True):
            assert event.id not in got, "it has ended"
            if isinstance(event, (Rows, Finished)) and event.captured:
                engine.written(event.id, event.captured.bytes)
                parts.setdefault(event.id, []).append(event.captured)
            if isinstance(event, Finished):
                rows = bits(joined(parts[event.id])) if event.captured else None
                got[event.id] = event.reason, event.error, list(event.tokens), rows
    return got


def bits(captured: Captured) -> tuple[Any, ...]:
    flat = {name: value.values if isinstance(value, Patterns) else value for name, value in captured.values.items()}
    return list(captured.positions), list(captured.token_ids), {name: value.tolist() for name, value in flat.items()}


@pytest.mark.parametrize("capture_bytes", [None, 150_000])
@pytest.mark.parametrize("window", [0, 20_000, 32 << 20])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_thread_brings_the_same_rows(
    seed, window, capture_bytes, build, byte_tokenizer, prompt, capturing, monkeypatch
):
    invariant = Model(build("qwen3"), byte_tokenizer, "qwen3", batch_invariant=True)
    monkeypatch.setattr(ring, "WINDOW_BYTES", window)
    monkeypatch.setattr(sequence, "RESERVED_TOKENS", 1)
    numbers, requests = random.Random(seed), list[Request]()
    for i in range(12):
        asked = {"tokens": numbers.choice(TOKENS), **numbers.choice(POINTS)}
        length, new = numbers.choice([1, 5, 34, 60]), numbers.choice([0, 1, 5, 25])
        id = f"cancelled {i}" if i % 4 == 3 else str(i)
        requests.append(capturing(invariant, id, prompt(length, i), new, **asked))
    kv_bytes = 14 * PAGE * KvMemory(invariant, 1, kv_bytes=1).position_bytes
    limits = {"prefill_tokens": 16, "max_running": 6, "kv_bytes": kv_bytes, "capture_bytes": capture_bytes}
    inline, threaded = (
        company(Engine(invariant, capture_thread=thread, **limits), requests, random.Random(seed))
        for thread in (False, True)
    )
    for id in (request.id for request in requests if not request.id.startswith("cancelled")):
        assert inline[id] == threaded[id]
        assert inline[id][-1]


def test_the_engine_waits_for_the_thread_only_where_no_window_has_room(tiny, prompt, capturing, monkeypatch):
    monkeypatch.setattr(ring, "WINDOW_STEPS", 5)
    model = tiny("qwen3")
    request = replace(capturing(model, "a", prompt(5), 40, points=["layers.*.output"]), ignore_eos=True)
    (want,) = Engine(model).generate([request])
    engine = Engine(model, capture_thread=True, fixed_memory=False)
    held, waited, wait = threading.Event(), list[int](), Worker.wait

    def waiting(worker, job):
        if job is not None and not job.done():
            waited.append(engine.statistics.steps)
            held.set()
        wait(worker, job)

    monkeypatch.setattr(Worker, "wait", waiting)
    engine._worker.run(held.wait)
    (got,) = engine.generate([request])
    assert waited[0] == 11  # the prompt, and two windows of five steps
    assert bits(got.captured) == bits(want.captured)


def test_a_recording_that_loses_a_part_while_its_end_is_under_way_fails(tiny, prompt, capturing, monkeypatch):
    model, held = tiny("qwen3"), threading.Event()
    engine = Engine(model, capture_bytes=1 << 10, capture_thread=True)
    engine.submit(replace(capturing(model, "a", prompt(5), 2, points=["layers.*.output"]), ignore_eos=True))
    with monkeypatch.context() as patched:
        patched.setattr(CaptureBuffer, "full", False)  # until all rows of the prompt are there
        engine.step()
        engine._worker.finish()
    engine._worker.run(held.wait)
    with_columns = output_processor._with_columns
    failing = iter([True])

    def fails_once(*args):
        if next(failing, False):
            raise IndexError("a readout without rows")
        return with_columns(*args)

    monkeypatch.setattr(output_processor, "_with_columns", fails_once)
    while not engine._output.ending:
        engine.step()
    held.set()
    events = list[Event]()
    while engine.statistics.running:
        events += engine.step(wait=True)
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.captured, end.error) == ("length", None, "IndexError: a readout without rows")
