"""Whatever comes and goes in whatever order, each request ends once, with what it gets alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.engine.engine import Engine
from deployments.engine.model import Model
from deployments.engine.request import Delta, Finished, Request

POINTS = ["layers.1.output", "lm_head.output"]
TOKENS = ["all", "prompt", "generated", "last", {"last": 3}]


class Submit(NamedTuple):
    length: int
    max_tokens: int
    tokens: Any  # of the capture; None captures nothing


class Cancel(NamedTuple):
    which: int


class Step(NamedTuple):
    times: int


submits = st.builds(
    Submit, st.sampled_from([1, 2, 5, 9, 17, 30]), st.integers(0, 12), st.sampled_from([None, None, *TOKENS])
)
actions = st.one_of(submits, submits, st.builds(Step, st.integers(1, 6)), st.builds(Cancel, st.integers(0, 15)))


def position_bytes(model):
    """KV memory of one position over all layers."""
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize


@functools.cache
def long_model(build, byte_tokenizer):
    return Model(build("qwen3", num_hidden_layers=2, max_position_embeddings=1024), byte_tokenizer, "qwen3")


def play(
    engine: Engine, schedule: list[Any], make: Callable[[str, Submit], Request]
) -> tuple[list[Request], list[Any]]:
    """Carry out a schedule; gives the requests sent and the events that came."""
    sent: list[Request] = []
    events: list[Any] = []
    for action in schedule:
        if isinstance(action, Submit):
            sent.append(make(str(len(sent)), action))
            engine.check(sent[-1])
            engine.submit(sent[-1])
        elif isinstance(action, Cancel):
            engine.cancel(str(action.which))  # sent, ended or never heard of
        else:
            for _ in range(action.times):
                events += engine.step()
    return sent, events


@pytest.fixture(scope="module")
def as_alone(tiny, alone, same_greedy, lone_values, assert_rows_close):
    """Checks one request's end against what it gets alone."""
    model = tiny("qwen3")
    greedy = functools.lru_cache(maxsize=None)(lambda prompt, new: alone(model, prompt, new))
    values = functools.lru_cache(maxsize=None)(lambda sequence, points: lone_values(model, sequence, points))

    def check(request: Request, finished: Finished, deltas: list[Delta]) -> None:
        want = greedy(tuple(request.prompt), request.max_tokens)
        streamed = [token for delta in deltas for token in delta.tokens]
        assert streamed == list(finished.tokens)
        if finished.reason == "cancelled":
            assert finished.captured is None
            assert same_greedy(model, request.prompt, finished.tokens, want[: len(finished.tokens)])
            return
        assert finished.reason in ("stop", "length")
        assert finished.error is None
        assert same_greedy(model, request.prompt, finished.tokens, want)
        if request.capture is None:
            assert finished.captured is None
            return
        lone = values((*request.prompt, *finished.tokens), request.points)
        rows = finished.captured.positions
        assert len(rows) == len(next(iter(finished.captured.values.values())))
        for point, value in finished.captured.values.items():
            assert_rows_close(value, lone[point][rows.start : rows.stop], point)

    return check


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schedule=st.lists(actions, min_size=4, max_size=24),
    max_running=st.integers(1, 6),
    slots=st.integers(1, 4),
    prefill_tokens=st.sampled_from([8, 40, 4096]),
)
def test_any_schedule_ends_every_request_once_with_what_it_gets_alone(
    schedule, max_running, slots, prefill_tokens, tiny, prompt, capturing, drain, endings, as_alone
):
    model = tiny("qwen3")

    def make(id: str, wanted: Submit) -> Request:
        ids = prompt(wanted.length)
        if wanted.tokens is None:
            return Request(id, ids, wanted.max_tokens)
        return capturing(model, id, ids, wanted.max_tokens, points=POINTS, tokens=wanted.tokens)

    memory = slots * 256 * position_bytes(model)  # the first bucket of a slot has 256 positions
    engine = Engine(model, max_running=max_running, prefill_tokens=prefill_tokens, kv_bytes=memory)
    sent, events = play(engine, schedule, make)
    events += drain(engine)
    done = endings(events)
    assert done.keys() == {request.id for request in sent}
    for request in sent:
        deltas = [event for event in events if isinstance(event, Delta) and event.id == request.id]
        as_alone(request, done[request.id], deltas)
    assert (engine.statistics.running, engine.statistics.waiting) == (0, 0)
    assert engine.statistics.kv_bytes <= memory


@pytest.mark.parametrize("tokens", [None, *TOKENS])
def test_a_request_that_loses_its_slot_is_run_again_and_keeps_each_row_once(
    tokens, build, byte_tokenizer, prompt, capturing, drain, endings, lone_values, same_greedy
):
    model = long_model(build, byte_tokenizer)
    memory = 1024 * position_bytes(model)  # two slots of 512 positions, or one of 1024
    prompts = [prompt(length) for length in (242, 230, 100)]

    def make(i: int) -> Request:
        new = (330, 300, 20)[i]
        if tokens is None:
            return Request(str(i), prompts[i], new, ignore_eos=True)
        request = capturing(model, str(i), prompts[i], new, points=POINTS, tokens=tokens)
        return Request(str(i), prompts[i], new, ignore_eos=True, capture=request.capture, points=request.points)

    tight, roomy = Engine(model, kv_bytes=memory), Engine(model)
    requests = [make(i) for i in range(3)]
    for request in requests:
        tight.submit(request)
    done = endings(drain(tight))
    lone = [roomy.generate([request])[0] for request in requests]
    assert tight.statistics.preempted > 0
    assert roomy.statistics.preempted == 0
    assert tight.statistics.kv_bytes <= memory
    for request, want in zip(requests, lone, strict=True):
        got = done[request.id]
        assert same_greedy(model, request.prompt, got.tokens, want.tokens)
        if tokens is not None:
            assert got.captured.positions == want.captured.positions
            values = lone_values(model, [*request.prompt, *got.tokens], request.points)
            rows = got.captured.positions
            for point, value in got.captured.values.items():
                torch.testing.assert_close(value, values[point][rows.start : rows.stop], rtol=1e-3, atol=1e-3)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cancels=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 320)), max_size=3))
def test_cancelling_among_requests_that_lose_their_slots_touches_no_other(
    cancels, build, byte_tokenizer, prompt, drain, endings
):
    model = long_model(build, byte_tokenizer)
    engine = Engine(model, kv_bytes=1024 * position_bytes(model))
    requests = [Request(str(i), prompt(235 + i), 300, ignore_eos=True) for i in range(4)]
    for request in requests:
        engine.submit(request)
    events = []
    for which, step in sorted(cancels, key=lambda cancel: cancel[1]):
        while engine.statistics.steps < step:
            events += engine.step()
        engine.cancel(str(which))
    done = endings(events + drain(engine))
    assert done.keys() == {"0", "1", "2", "3"}
    cancelled = {str(which) for which, _ in cancels}
    for id, finished in done.items():
        assert finished.reason == "length" or id in cancelled
        assert finished.reason == "cancelled" or len(finished.tokens) == 300


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


def test_cancelling_what_is_not_there_does_nothing(tiny, prompt, drain, endings):
    engine = Engine(tiny("qwen3"))
    engine.cancel("nobody")
    assert engine.step() == []
    engine.submit(Request("a", prompt(5), 6))
    engine.cancel("nobody")
    done = endings(drain(engine))
    engine.cancel("a")  # it has ended
    assert done.keys() == {"a"}
    assert drain(engine) == []


def test_statistics_count_forwards_and_tokens(tiny, prompt):
    engine = Engine(tiny("qwen3"))
    engine.generate([Request("a", prompt(5), 6, ignore_eos=True), Request("b", prompt(9), 4, ignore_eos=True)])
    assert engine.statistics.tokens == 10
    assert engine.statistics.steps == 6  # one prefill, five decodes
