"""When memory runs out, as few requests as possible end, and the engine goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deployments.engine import kv_memory
from deployments.engine import sequence as sequence_module
from deployments.engine.decoding.sampling import choose
from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.model import device_memory
from deployments.model.batch import PAGE, SequenceKv
from deployments.model.device_memory import left_in_container
from deployments.model.model import Model


def test_a_newcomer_for_whom_memory_cannot_grow_waits_and_touches_nobody(tiny, monkeypatch, drain, endings):
    model = tiny("qwen3", max_position_embeddings=1024)
    requests = [Request("a", [5, 6, 7], 40, ignore_eos=True), Request("b", [8] * 600, 10, ignore_eos=True)]
    alone = Engine(model).generate(requests)
    engine = Engine(model)
    engine.submit(requests[0])
    engine.step()
    forward = Model.forward

    def out_of_memory_while_another_runs(model, batch, *rest, **options):
        if len(batch.spans) > 1 and batch.rows > 50:
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")
        return forward(model, batch, *rest, **options)

    monkeypatch.setattr(Model, "forward", out_of_memory_while_another_runs)
    engine.submit(requests[1])
    done = endings(drain(engine))
    assert engine.statistics.out_of_memory > 0
    for request, want in zip(requests, alone, strict=True):
        assert done[request.id].reason == "length"
        assert list(done[request.id].tokens) == list(want.tokens)


def test_states_take_half_of_the_memory_and_limit_the_sequences_that_run(tiny, prompt):
    model = tiny("qwen3_next")
    one = kv_memory.KvMemory(model, 1, kv_bytes=1)
    engine = Engine(model, max_running=8, kv_bytes=6 * one.slot_bytes)
    assert (engine._memory.slots, engine.statistics.kv_budget_bytes <= 6 * one.slot_bytes) == (3, True)
    requests = [Request(str(i), prompt(5 + i, i), 6, ignore_eos=True) for i in range(7)]
    most = 0
    for request in requests:
        engine.submit(replace(request, streamed=False))
    events = engine.step()
    while engine.statistics.running or engine.statistics.waiting:
        most = max(most, engine.statistics.running)
        events += engine.step()
    assert most == 3
    assert {done.id: done.tokens for done in events} == {r.id: Engine(model).generate([r])[0].tokens for r in requests}


def test_a_prompts_next_chunk_takes_no_memory_that_a_neighbours_next_token_would(tiny, prompt, monkeypatch, endings):
    monkeypatch.setattr(sequence_module, "RESERVED_TOKENS", 1)
    model = tiny("qwen3")
    requests = [Request("a", prompt(4), 20, ignore_eos=True), Request("b", prompt(15), 1)]
    alone = [Engine(model).generate([request])[0].tokens for request in requests]
    two_pages = 32 * kv_memory.KvMemory(model, 1, kv_bytes=1).position_bytes
    engine = Engine(model, prefill_tokens=4, kv_bytes=two_pages)
    engine.submit(requests[0])
    events = [event for _ in range(10) for event in engine.step()]  # 16 of its tokens are in before b's last chunk
    engine.submit(requests[1])
    while len(done := endings(events)) < 2:
        events += engine.step()
        assert engine.statistics.kv_bytes <= two_pages
    assert [done[request.id].tokens for request in requests] == alone


@pytest.fixture
def small_machine(monkeypatch):
    """A machine with 1 GiB of free memory, which has seen no reservation before this test."""
    device = torch.device("cpu")

    def files() -> dict[int, Path]:
        return {file.stat().st_ino: file for file in Path("/proc/self/fd").iterdir() if file.exists()}

    before, held = files(), device_memory.held_bytes(device)
    monkeypatch.setattr(device_memory.glob, "iglob", lambda _: [file for i, file in files().items() if i not in before])
    monkeypatch.setattr(device_memory, "free_bytes", lambda _: (1 << 30) + held - device_memory.held_bytes(device))


@pytest.mark.cpu
@pytest.mark.usefixtures("small_machine")
def test_pages_that_another_model_has_reserved_and_not_written_to_are_not_free(tiny):
    def reserved(name: str) -> kv_memory.KvMemory:
        return kv_memory.KvMemory(tiny(name), 10**7, kv_fraction=0.25)  # nothing else limits it

    first = reserved("qwen3")
    assert reserved("qwen3").budget_bytes > 0.9 * first.budget_bytes  # another replica, whose share is its own
    beside = reserved("llama").budget_bytes
    assert beside < 0.85 * first.budget_bytes  # a fourth of the other three
    assert first.grow(SequenceKv(), first.pages * PAGE)  # from now on the system counts them
    assert reserved("llama").budget_bytes > 1.1 * beside
    del first
    assert reserved("llama").budget_bytes > 1.1 * beside


@pytest.mark.cpu
@pytest.mark.usefixtures("small_machine")
def test_a_model_that_is_loaded_when_all_is_reserved_gets_a_tenth(tiny):
    first = kv_memory.KvMemory(tiny("qwen3"), 10**7, kv_fraction=0.99)
    assert first.budget_bytes > 0.9 * (1 << 30)
    assert 0.04 * (1 << 30) < kv_memory.KvMemory(tiny("llama"), 10**7, kv_fraction=0.5).budget_bytes < 0.06 * (1 << 30)


def test_a_bad_request_among_good_ones_leaves_none_behind(tiny):
    engine = Engine(tiny("qwen3"))
    with pytest.raises(ValueError, match="no tokens"):
        engine.generate([Request("a", [5], 1), Request("b", [], 1)])
    engine.generate([Request("c", [5], 2, ignore_eos=True)])
    assert engine.statistics.tokens == 2


V2 = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 400\ninactive_file 300"}
V1 = {
    "memory/memory.limit_in_bytes": "1000",
    "memory/memory.usage_in_bytes": "700",
    "memory/memory.stat": "rss 400\ntotal_inactive_file 300",
}


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("files", "left"),
    [(V2, 600), (V1, 600), (V2 | {"memory.max": "max"}, None), (V2 | {"memory.max": "300"}, 0), ({}, None)],
)
def test_a_containers_limit_bounds_what_is_free(files, left, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert left_in_container(tmp_path) == left


@pytest.mark.parametrize(("failing", "prefill_tokens"), [(1, 64), *((at, 4) for at in range(4, 12, 2))])
def test_no_memory_for_the_draw_costs_no_request_and_no_row_twice(
    failing, prefill_tokens, tiny, prompt, capturing, lone_values, assert_rows_close, monkeypatch
):
    model = tiny("qwen3")
    requests = [capturing(model, str(i), prompt(5, i), 8, points=["layers.*.output"]) for i in range(3)]
    want = [list(done.tokens) for done in Engine(model).generate(requests)]
    calls = 0

    def short_of_memory_once(*args):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")
        return choose(*args)

    monkeypatch.setattr("deployments.engine.output_processor.choose", short_of_memory_once)
    # Some chunks end right before a token that was recorded.
    engine = Engine(model, prefill_tokens=prefill_tokens, fixed_memory=False)
    for request, tokens, done in zip(requests, want, engine.generate(requests), strict=True):
        assert (done.error, list(done.tokens)) == (None, tokens)
        sequence = [*request.prompt, *tokens]
        assert done.captured.positions == range(len(sequence))
        for point, values in lone_values(model, sequence, request.points).items():
            assert_rows_close(done.captured.values[point], values, point)
    assert engine.statistics.out_of_memory == 1


def test_of_prompts_that_find_no_memory_together_none_is_refused(tiny, prompt, monkeypatch):
    model = tiny("qwen3")
    requests = [Request(str(i), prompt(4, i), 3) for i in range(8)]
    want = [list(done.tokens) for done in Engine(model).generate(requests)]
    forward = Model.forward

    def room_for_three(model, batch, *rest, **options):
        if len(batch.spans) > 3:
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")
        return forward(model, batch, *rest, **options)

    monkeypatch.setattr(Model, "forward", room_for_three)
    done = Engine(model).generate(requests)
    assert [(one.error, list(one.tokens)) for one in done] == [(None, tokens) for tokens in want]
