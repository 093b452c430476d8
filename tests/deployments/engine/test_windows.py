"""Where every layer has a window or chunks, a sequence holds their pages alone, with the results of all pages."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine import sequence
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import NO_PAGE, KvMemory, pages_for
from deployments.engine.request import Finished, Request
from deployments.engine.scheduler import MIN_PROMPT_TOKENS
from deployments.errors import RequestError
from deployments.model import kv_cache
from deployments.model.batch import PAGE

WINDOW, CONTEXT, NEW = 24, 256, 8
LENGTHS = (1, 23, 40, 90, 120)
POINTS = ["layers.*.output", "layers.*.attention.weights", "lm_head.output"]
EXAMPLES = settings().max_examples // 5


@pytest.fixture(scope="module", params=["mistral", "phi3", "qwen3_windows", "llama4"])
def windowed(request, tiny):
    own = {
        "qwen3_windows": {"max_window_layers": 0},
        "llama4": {"no_rope_layer_interval": 4, "attention_chunk_size": WINDOW},
    }.get(request.param, {})
    sizes = {"sliding_window": WINDOW, "max_position_embeddings": CONTEXT, "attn_implementation": "eager"}
    return tiny(request.param, **sizes, **own)


@pytest.fixture(scope="module")
def lone(windowed, make_lone, prompt):
    common = prompt(5 * PAGE)
    return make_lone(windowed, {n: [*common[: n // 2], *prompt(n - n // 2, 1)] for n in LENGTHS}, NEW)


@pytest.fixture(scope="module", autouse=True)
def _little_is_reserved():
    """So that requests come to want more than there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "RESERVED_TOKENS", 1)
        yield


@contextmanager
def attending(how):
    """While open, the compiled kernel computes attention, or torch's operations do."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "torch":
            patch.setattr(kv_cache, "attention_kernel", lambda _: None)
        yield


def with_pages(model, pages, **options):
    return Engine(model, kv_bytes=pages * PAGE * KvMemory(model, 1, kv_bytes=1).position_bytes, **options)


def spoil(engine):
    """Have nothing finite in pages that nobody holds or may come to share."""
    for layer in engine._memory.cache._layers.values():
        for part in (layer.keys, layer.values):
            part[engine._memory._free] = torch.nan


def play(engine, requests, chunk):
    """Run requests to their ends; their events, and the most that were under way at once."""
    for request in requests:
        engine.check(request)
        engine.submit(request)
    events, most = [], 0
    while sum(isinstance(event, Finished) for event in events) < len(requests):
        spoil(engine)
        events += engine.step()
        pages = [[page for page in seq.kv.pages if page != NO_PAGE] for seq in engine._scheduler.running]
        assert all(len(own) <= pages_for(WINDOW + max(chunk, MIN_PROMPT_TOKENS) + PAGE - 2) for own in pages)
        most = max(most, len(pages))
    return events, most


@pytest.mark.parametrize("how", [pytest.param("kernel", marks=pytest.mark.cpu), "torch"])
@settings(max_examples=EXAMPLES)
@given(
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=6),
    chunk=st.sampled_from([5, 17, 64]),
    max_running=st.integers(1, 5),
    pages=st.sampled_from([4, 6, 9, 40]),
)
def test_any_schedule_gives_what_transformers_does(how, lengths, chunk, max_running, pages, windowed, lone, capturing):
    requests = []
    for i, length in enumerate(lengths):
        tokens = ("all", "generated", {"last": 5})[i % 3]
        asked = capturing(windowed, str(i), lone.prompts[length], NEW, points=POINTS, tokens=tokens)
        requests.append(replace(asked, logprobs=2, prompt_logprobs=1 if i % 3 == 0 else None))
    with attending(how):
        engine = with_pages(windowed, pages, prefill_tokens=chunk, max_running=max_running)
        events, _ = play(engine, requests, chunk)
    for request in requests:
        lone.check(request, [event for event in events if event.id == request.id], cancelled=False)


def test_what_passes_out_of_the_window_makes_room_for_others(windowed, prompt):
    requests = [Request(str(n), prompt(180, n), 30, ignore_eos=True) for n in range(3)]
    engine = with_pages(windowed, 15, prefill_tokens=32)  # 240 tokens
    events, running = play(engine, requests, 32)
    assert (running, engine.statistics.preempted) == (3, 0)
    done = {event.id: event.tokens for event in events if isinstance(event, Finished)}
    for request in requests:
        assert done[request.id] == Engine(windowed).generate([request])[0].tokens


def test_beginnings_are_shared_beyond_the_window(windowed, prompt):
    beginning = prompt(6 * PAGE)
    first, second = (Request(str(n), [*beginning, *prompt(9, n)], 20, ignore_eos=True) for n in range(2))
    want = [Engine(windowed).generate([request])[0].tokens for request in (first, second)]
    engine = with_pages(windowed, 40)
    done = [engine.generate([request])[0] for request in (first, second)]
    assert [one.tokens for one in done] == want
    assert done[1].cached == len(beginning)
    turn = replace(first, prompt=[*first.prompt, *want[0], 9, 8])
    assert engine.generate([turn])[0].cached == (len(first.prompt) + 19) // PAGE * PAGE


def test_of_a_beginning_that_gives_way_the_end_goes_first(windowed, prompt):
    engine = with_pages(windowed, 12, prefill_tokens=32)
    first = Request("a", prompt(12 * PAGE), 1, ignore_eos=True)
    want = engine.generate([first])[0].tokens
    engine.generate([Request("b", prompt(12 * PAGE, 1), 1, ignore_eos=True)])  # some pages of the first are taken
    again = engine.generate([first])[0]
    assert again.tokens == want
    assert 0 < again.cached < 11 * PAGE


def test_memory_for_the_window_is_enough_for_the_whole_context(windowed, tiny, prompt):
    most = pages_for(WINDOW + 2 * PAGE - 2)
    whole = Request("a", prompt(CONTEXT - 10), 10, ignore_eos=True)
    (done,) = with_pages(windowed, most).generate([whole])
    assert done.tokens == Engine(windowed).generate([whole])[0].tokens
    with pytest.raises(RequestError) as refused:
        with_pages(windowed, most - 1).check(whole)
    assert refused.value.code == "kv_memory_exceeded"
    some = tiny("gemma3", sliding_window=WINDOW, max_position_embeddings=CONTEXT)  # one of its layers has no window
    with pytest.raises(RequestError):
        with_pages(some, most).check(whole)
