"""Common prefixes of prompts are computed once. Those that are recorded, edited or another owner's are not shared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from by_hand import point as point_of
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.edits import Edit, Tokens
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import NO_PAGE, KvMemory
from deployments.engine.request import Request
from deployments.model import kv_cache
from deployments.model.batch import PAGE, SequenceKv
from deployments.model.model import Model

BEGINNING = 3 * PAGE  # tokens


@pytest.fixture
def two(prompt):
    """Two requests with a beginning in common, the second of another text behind it."""
    beginning = prompt(BEGINNING)
    return [Request(str(i), [*beginning, *prompt(7, 1 + i)], 6, ignore_eos=True) for i in range(2)]


def test_a_beginning_that_was_run_is_run_once_with_the_same_answer(two, tiny):
    model = tiny("qwen3")
    alone = [Engine(model).generate([request])[0].tokens for request in two]
    engine = Engine(model)
    done = [engine.generate([request])[0] for request in two]
    assert [one.tokens for one in done] == alone
    assert [one.cached for one in done] == [0, BEGINNING]


def test_an_answer_goes_on_in_the_next_prompt(two, tiny):
    engine = Engine(tiny("qwen3"))
    request = replace(two[0], max_tokens=20)
    (first,) = engine.generate([request])
    (second,) = engine.generate([replace(request, prompt=[*request.prompt, *first.tokens, 9, 8], max_tokens=2)])
    assert second.cached == (len(request.prompt) + 19) // PAGE * PAGE  # the last token was never run


def test_another_owners_beginning_is_not_shared(two, tiny):
    engine = Engine(tiny("qwen3"))
    engine.generate([replace(two[0], owner="a")])
    assert engine.generate([replace(two[1], owner="b")])[0].cached == 0
    assert engine.generate([replace(two[1], owner="a")])[0].cached == BEGINNING


def test_what_is_recorded_or_scored_is_run(two, tiny, capturing, lone_values, assert_rows_close):
    model = tiny("qwen3")
    for tokens, cached in (("all", 0), ("generated", BEGINNING), ({"prompt_last": 9}, 2 * PAGE), ("last", BEGINNING)):
        engine = Engine(model)
        engine.generate([two[0]])
        asked = capturing(model, "a", two[1].prompt, 4, points=["layers.*.output"], tokens=tokens)
        (done,) = engine.generate([asked])
        assert done.cached == cached, tokens
        rows = torch.tensor(list(done.captured.positions))
        for point, want in lone_values(model, [*asked.prompt, *done.tokens], asked.points).items():
            assert_rows_close(done.captured.values[point], want[rows], point)
    engine = Engine(model)
    engine.generate([two[0]])
    assert engine.generate([replace(two[1], prompt_logprobs=0)])[0].cached == 0


def test_what_an_edit_changed_is_neither_taken_nor_given(two, tiny):
    model = tiny("qwen3")
    at = point_of(model, "layers.0.output")
    late = Edit(at, "scale", low=0.5, tokens=Tokens(2 * PAGE + 3))
    alone = [Engine(model).generate([one])[0].tokens for one in (two[1], replace(two[1], edits=(late,)))]
    engine = Engine(model)
    engine.generate([replace(two[0], edits=(late,))])
    plain = engine.generate([two[1]])[0]
    changed = engine.generate([replace(two[1], edits=(late,))])[0]
    assert (plain.cached, changed.cached) == (2 * PAGE, 2 * PAGE)
    assert [plain.tokens, changed.tokens] == alone


def test_what_a_failed_forward_pass_may_have_spoiled_is_not_given(two, build, byte_tokenizer, monkeypatch):
    """In torch's attention, a value that is not finite spoils earlier rows of its prompt, too."""
    monkeypatch.setattr(kv_cache, "attention_kernel", lambda _: None)
    model = Model(build("qwen3"), byte_tokenizer, "qwen3")
    spoiled, sound = two[0], replace(two[1], prompt=[*two[0].prompt[:-1], 251])
    spoiled = replace(spoiled, prompt=[*spoiled.prompt[:-1], 250])

    def spoil(_, args, output):
        return output.masked_fill((args[0] == 250)[..., None], torch.nan)

    model.hf.get_input_embeddings().register_forward_hook(spoil)
    engine = Engine(model)
    assert engine.generate([spoiled])[0].reason == "error"
    (done,) = engine.generate([sound])
    assert (done.reason, done.cached) == ("length", 0)


def test_pages_that_are_kept_give_way_to_whoever_needs_them(tiny, prompt):
    model = tiny("qwen3")
    engine = Engine(model, kv_bytes=4 * PAGE * KvMemory(model, 1, kv_bytes=1).position_bytes)
    for seed in range(6):
        (done,) = engine.generate([Request("a", prompt(50, seed), 10, ignore_eos=True)])
        assert (len(done.tokens), done.cached) == (10, 0)
        assert engine.statistics.kv_bytes <= engine.statistics.kv_budget_bytes


@pytest.mark.parametrize("name", ["qwen3", "mistral"])  # the second has windows, which pages leave
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 70), st.booleans()), max_size=30))
def test_each_page_is_held_as_often_as_sequences_say(name, tiny, turns):
    memory = KvMemory(tiny(name), 1, kv_bytes=12 * PAGE * KvMemory(tiny(name), 1, kv_bytes=1).position_bytes)
    pages = memory.pages
    held: dict[int, SequenceKv] = {}
    for number, kind, size, ends in turns:
        tokens = [kind] * size
        if number in held and ends:
            memory.release(held.pop(number))
        elif number not in held:
            held[number] = SequenceKv()
            shared = memory.share(held[number], tokens, size - 1, "owner")
            assert shared <= max(0, size - 1)
            memory.slide(held[number], shared)
            if memory.grow(held[number], size):
                memory.remember(held[number], tokens, size)
                memory.slide(held[number], size)
        used = [{page for page in kv.pages if page != NO_PAGE} for kv in held.values()]
        assert memory.available == pages - len(set().union(*used))
        assert [len(own) for own in used] == [len(kv.pages) - kv.passed for kv in held.values()]
    for kv in held.values():
        memory.release(kv)
    assert memory.available == pages
