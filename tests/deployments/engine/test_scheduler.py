"""The scheduler: preemption, cancellation, fairness, and the engine's counters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.engine import sequence
from deployments.engine.capture_budget import CaptureBudget
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Delta, Finished, Request, Rows
from deployments.engine.scheduler import MOST_OVERTAKING
from deployments.engine.sequence import Sequence
from deployments.model.batch import PAGE, SequenceKv
from deployments.model.model import Model


def test_cancelling_frees_the_slot_at_the_next_step(tiny, prompt, endings):
    engine = Engine(tiny("qwen3"), max_running=1)
    engine.submit(Request("long", prompt(5), 60, ignore_eos=True))
    engine.submit(Request("next", prompt(6), 3))
    for _ in range(4):
        engine.step()
    assert (engine.statistics.running, engine.statistics.waiting) == (1, 1)
    engine.cancel("long")
    events = engine.step()
    assert endings(events)["long"].reason == "cancelled"
    assert len(endings(events)["long"].tokens) == 4
    assert [event.id for event in events if isinstance(event, Delta)] == ["next"]  # it has the slot already
    assert (engine.statistics.running, engine.statistics.waiting) == (1, 0)


def test_a_waiting_request_is_cancelled_before_it_runs(tiny, prompt, drain, endings):
    engine = Engine(tiny("qwen3"))
    engine.submit(Request("a", prompt(5), 6))
    engine.cancel("a")
    events = drain(engine)
    assert [event for event in events if isinstance(event, Delta)] == []
    assert endings(events)["a"].reason == "cancelled"


def test_what_a_request_recorded_counts_while_it_waits_for_its_slot_again(tiny, prompt, capturing, monkeypatch):
    monkeypatch.setattr(sequence, "RESERVED_TOKENS", 1)  # so that they come to want more than there is
    model = tiny("qwen3", num_hidden_layers=2, max_position_embeddings=256)
    memory = 208 * KvMemory(model, 1, kv_bytes=1).position_bytes
    engine = Engine(model, kv_bytes=memory)
    for i, (length, new) in enumerate([(62, 90), (58, 80)]):
        request = capturing(model, str(i), prompt(length), new, points=["layers.1.output"], tokens="all")
        engine.submit(replace(request, ignore_eos=True))
    held = engine.statistics.capture_bytes
    while not engine.statistics.preempted:
        held = engine.statistics.capture_bytes
        engine.step()
    assert engine.statistics.waiting == 1
    assert engine.statistics.capture_bytes >= held > 0


@pytest.mark.parametrize(("streamed", "owner", "steps"), [(True, "ann", 9), (False, "bob", 9), (False, "ann", 1)])
def test_a_long_prompt_goes_in_chunks_beside_streams_and_owners_with_few_tokens(
    streamed, owner, steps, build, byte_tokenizer, prompt
):
    model = Model(build("qwen3", num_hidden_layers=2, max_position_embeddings=1024), byte_tokenizer, "qwen3")
    engine = Engine(model, prefill_tokens=260)
    engine.submit(Request("first", prompt(5), 100, ignore_eos=True, streamed=streamed, owner=owner))
    engine.step()
    engine.submit(Request("long", prompt(260), 1, owner="ann"))
    before = engine.statistics.tokens
    while not any(event.id == "long" for event in engine.step()):
        pass
    assert engine.statistics.tokens - before == 1 + steps  # a decode of the first beside each chunk


def test_the_prompt_of_an_owner_with_few_tokens_goes_at_once_beside_anothers_many(build, byte_tokenizer, prompt):
    model = Model(build("qwen3", num_hidden_layers=2, max_position_embeddings=1024), byte_tokenizer, "qwen3")
    engine = Engine(model, prefill_tokens=1024)
    for name in ("a", "b", "c"):
        engine.submit(Request(name, prompt(600), 100, ignore_eos=True, owner="ann", streamed=False))
    while engine.statistics.tokens < 9:
        engine.step()
    engine.submit(Request("bobs", prompt(300), 1, owner="bob"))
    before = engine.statistics.tokens
    while not any(event.id == "bobs" for event in engine.step()):
        pass
    assert engine.statistics.tokens - before == 3 + 1


def test_a_long_prompt_stops_no_short_one(tiny, prompt):
    engine = Engine(tiny("qwen3"), prefill_tokens=32)
    engine.submit(Request("stream", prompt(4), 60, ignore_eos=True, streamed=True))
    engine.step()
    engine.submit(Request("long", prompt(90), 1))
    engine.step()
    engine.submit(Request("short", prompt(3), 1))
    order = []
    while len(order) < 2:
        order += [event.id for event in engine.step() if isinstance(event, Delta) and event.id != "stream"]
    assert order == ["short", "long"]


def with_pages(build, byte_tokenizer, pages: int) -> Engine:
    """An engine with so many pages of keys and values."""
    model = Model(build("qwen3", num_hidden_layers=1, max_position_embeddings=2048), byte_tokenizer, "qwen3")
    return Engine(model, kv_bytes=pages * PAGE * KvMemory(model, 1, kv_bytes=1).position_bytes)


def test_what_waits_for_pages_stops_no_request_that_fits(build, byte_tokenizer, prompt):
    engine = with_pages(build, byte_tokenizer, 20)
    engine.submit(Request("running", prompt(10 * PAGE), PAGE, ignore_eos=True))
    engine.step()
    engine.submit(Request("large", prompt(15 * PAGE), 1))
    engine.submit(Request("short", prompt(PAGE), 1))
    order = []
    while len(order) < 3:
        order += [event.id for event in engine.step() if isinstance(event, Finished)]
    assert order == ["short", "running", "large"]


def test_what_waits_for_pages_is_overtaken_a_bounded_number_of_times(build, byte_tokenizer, prompt):
    engine = with_pages(build, byte_tokenizer, 20)
    engine.submit(Request("running", prompt(4), 2, ignore_eos=True))
    engine.step()
    engine.submit(Request("large", prompt(19 * PAGE), 1))
    ended, sent = [], 0
    while "large" not in ended:
        while sent - len(ended) < 3:  # there is always a next one that fits
            engine.submit(Request(f"short {sent}", prompt(2 * PAGE, sent), 8, ignore_eos=True))
            sent += 1
        ended += [event.id for event in engine.step() if isinstance(event, Finished)]
        assert sent < 2 * MOST_OVERTAKING


def test_pages_that_others_hold_are_not_asked_for_again(build, byte_tokenizer, prompt):
    engine = with_pages(build, byte_tokenizer, 16)
    beginning = prompt(8 * PAGE)
    for i in range(4):
        engine.submit(Request(str(i), [*beginning, *prompt(5, i)], PAGE, ignore_eos=True))
    most = 0
    while engine.statistics.running or not most:
        engine.step()
        most = max(most, engine.statistics.running)
    assert most == 4  # 8 pages of the beginning and two of each


def started(engine: Engine, most: int) -> list[str]:
    """The owners of the next requests, in the order in which they get their first token."""
    known = {seq.request.id for seq in engine._scheduler.running}
    order: list[str] = []
    while len(order) < most:
        for event in engine.step():
            if isinstance(event, Delta) and event.id not in known:
                known.add(event.id)
                order.append(event.id.partition(" ")[0])
    return order[:most]


def queue(engine: Engine, owner: str, count: int, prompt: list[int], new: int = 6) -> None:
    for i in range(count):
        engine.submit(Request(f"{owner} {i}", prompt, new, ignore_eos=True, owner=owner))


def test_who_queues_one_request_waits_for_none_of_anothers_hundred(tiny, prompt):
    engine = Engine(tiny("qwen3"), max_running=2)
    queue(engine, "a", 100, prompt(5))
    engine.step()
    queue(engine, "b", 1, prompt(5))
    assert started(engine, 3) == ["b", "a", "a"]


def test_owners_get_equally_many_tokens_and_a_pause_gives_no_right_to_more(tiny, prompt):
    engine = Engine(tiny("qwen3"), max_running=2)
    queue(engine, "a", 20, prompt(5))
    assert started(engine, 10) == ["a"] * 10
    queue(engine, "b", 20, prompt(5), 16)  # each takes as many tokens as two of the other's
    tokens = dict.fromkeys("ab", 0)
    for _ in range(60):
        for event in engine.step():
            if isinstance(event, Finished):
                tokens[event.id[0]] += len(event.prompt) + len(event.tokens)
    assert min(tokens.values()) > 60
    assert abs(tokens["a"] - tokens["b"]) <= 2 * 21


def test_what_a_request_ran_itself_before_it_lost_its_pages_is_not_said_to_be_cached(tiny, prompt):
    engine = Engine(tiny("qwen3"), prefill_tokens=40)
    engine.submit(Request("a", prompt(60), 2, ignore_eos=True))
    engine.step()
    engine._scheduler.preempt(engine._scheduler.running[0])
    events = [event for _ in range(4) for event in engine.step()]
    assert [event.cached for event in events if isinstance(event, Finished)] == [0]


def test_a_request_that_lost_its_pages_stops_none_that_fits(build, byte_tokenizer, prompt):
    engine = with_pages(build, byte_tokenizer, 20)
    for id, seed in (("holds", 0), ("lost", 1)):
        engine.submit(Request(id, prompt(8 * PAGE, seed), PAGE, ignore_eos=True))
    engine.step()
    engine._scheduler.preempt(engine._scheduler.running[1])
    assert engine._memory.grow(SequenceKv(), 8 * PAGE)  # pages that another would have taken
    engine.submit(Request("other", prompt(PAGE), 8, ignore_eos=True))
    engine.step()
    assert [seq.request.id for seq in engine._scheduler.running] == ["holds", "other"]


def test_while_capture_memory_is_full_a_step_looks_at_few_that_wait_and_each_keeps_its_place(
    tiny, prompt, capturing, drain, endings, monkeypatch
):
    model, points, queued = tiny("qwen3"), ["layers.0.output"], 100
    first = capturing(model, "first", prompt(40), 1, points=points, tokens="prompt")
    size = Engine(model).generate([first])[0].captured.bytes
    engine = Engine(model, max_running=1, capture_bytes=3 * size // 2)
    engine.submit(first)
    drain(engine)  # its rows are not written: no other request that records may start
    for i in range(0, queued, 2):
        engine.submit(capturing(model, str(i), prompt(3, i), 1, points=points, tokens="all"))
        engine.submit(capturing(model, str(i + 1), prompt(3, i), 1, points=points, tokens={"last": 1}))
    for i in range(2):
        engine.submit(Request(f"plain {i}", prompt(3, i), 1))
    looked, admits = list[str](), CaptureBudget.admits

    def looking(budget: CaptureBudget, seq: Sequence, reserved: int) -> bool:
        looked.append(seq.request.id)
        return admits(budget, seq, reserved)

    monkeypatch.setattr(CaptureBudget, "admits", looking)
    assert [endings(engine.step()).keys() for _ in range(2)] == [{"plain 0"}, {"plain 1"}]
    assert len(looked) <= 2 * 4
    engine.written("first", size)
    engine.submit(Request("late", prompt(4), 1))
    ended = []
    while len(ended) < queued + 1:
        for done in endings(engine.step()).values():
            ended.append(done.id)
            if done.captured:
                engine.written(done.id, done.captured.bytes)
    assert ended == [*map(str, range(queued)), "late"]


def test_bytes_that_are_not_written_yet_are_counted_whoever_they_are_of(tiny, prompt, capturing):
    engine = Engine(tiny("qwen3"), capture_bytes=1 << 20)
    requests = [capturing(engine.model, id, prompt(4), 2, points=["layers.0.output"]) for id in "ab"]
    for request in requests:
        engine.submit(request)
    sent = dict.fromkeys("ab", 0)
    left = len(requests)
    while left:
        for event in engine.step():
            left -= isinstance(event, Finished)
            if isinstance(event, (Rows, Finished)) and event.captured is not None:
                sent[event.id] += event.captured.bytes
    assert min(sent.values()) > 0
    for written, rest in (("a", 1 << 30), ("a", 1), ("nobody", 5), ("b", 1)):
        engine.written(written, rest)
    engine.step()
    assert engine.statistics.capture_bytes == sent["b"] - 1
    engine.written("b", sent["b"] - 1)
    engine.step()
    assert engine.statistics.capture_bytes == 0
