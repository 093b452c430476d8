"""The smallest, the largest and the broken: what a request may be, and what ends it alone."""

from contextlib import contextmanager

import pytest
import torch

from deployments.engine.engine import Engine
from deployments.engine.model import Model
from deployments.engine.request import Delta, Request
from deployments.errors import RequestError

RARE = 255  # in no prompt of these tests but those that mean it


def without_rare(prompt, length, seed=0):
    return [token if token != RARE else 7 for token in prompt(length, seed)]


@contextmanager
def embedding_breaks(model, token, value):
    """While open, one token's embedding is not finite."""

    def spoil(_, args, output):
        return output.masked_fill((args[0] == token)[..., None], value)

    hook = model.hf.get_input_embeddings().register_forward_hook(spoil)
    try:
        yield
    finally:
        hook.remove()


def test_no_new_tokens_runs_the_prompt_through_and_captures_it(
    tiny, prompt, capturing, drain, lone_values, assert_rows_close
):
    model = tiny("qwen3")
    request = capturing(model, "a", prompt(6), 0, points=["layers.1.output", "lm_head.output"], mode="trace")
    engine = Engine(model)
    engine.submit(request)
    (finished,) = drain(engine)
    assert (finished.reason, list(finished.tokens)) == ("length", [])
    for point, want in lone_values(model, request.prompt, request.points).items():
        assert_rows_close(finished.captured.values[point], want, point)


@pytest.mark.parametrize(("tokens", "rows"), [("prompt", 6), ("generated", 0), ("last", 1), ({"last": 2}, 2)])
def test_a_trace_has_the_rows_asked_for_of_the_prompt(tokens, rows, tiny, prompt, capturing):
    model = tiny("qwen3")
    request = capturing(model, "a", prompt(6), 0, points=["layers.1.output"], mode="trace", tokens=tokens)
    (finished,) = Engine(model).generate([request])
    assert finished.captured.values["layers.1.output"].shape == (rows, 32)
    assert len(finished.captured.positions) == rows


def test_a_prompt_of_one_token_is_served(tiny, alone):
    model = tiny("qwen3")
    (finished,) = Engine(model).generate([Request("a", [9], 12)])
    assert list(finished.tokens) == alone(model, [9], 12)


@pytest.mark.parametrize("length", [1, 40, 95])
def test_the_whole_context_may_be_filled(length, tiny, prompt, capturing, lone_values, assert_rows_close):
    model = tiny("qwen3")
    new = model.context - length
    plain = Request("plain", prompt(length), new, ignore_eos=True)
    request = capturing(model, "a", prompt(length), new, points=["layers.1.output"])
    filled, captured = Engine(model).generate([plain, request])
    assert len(filled.tokens) == new
    sequence = [*request.prompt, *captured.tokens]
    (want,) = lone_values(model, sequence, request.points).values()
    assert_rows_close(captured.captured.values["layers.1.output"], want)


def test_a_prompt_as_long_as_the_context_may_be_traced(tiny, prompt, capturing):
    model = tiny("qwen3")
    (finished,) = Engine(model).generate([capturing(model, "a", prompt(model.context), 0, points=["norm.output"])])
    assert len(finished.captured.values["norm.output"]) == model.context


@pytest.mark.parametrize(
    ("length", "max_tokens", "field"),
    [(96, 1, "prompt"), (97, 0, "prompt"), (40, 57, "max_tokens"), (95, 2, "max_tokens")],
)
def test_more_than_the_context_is_refused_by_the_field_at_fault(length, max_tokens, field, tiny, prompt):
    engine = Engine(tiny("qwen3"))
    with pytest.raises(RequestError) as refused:
        engine.check(Request("a", prompt(length), max_tokens))
    assert refused.value.field == field
    assert refused.value.code == "context_length_exceeded"
    assert "96" in refused.value.message


def test_a_prompt_without_tokens_is_refused(tiny):
    with pytest.raises(RequestError) as refused:
        Engine(tiny("qwen3")).check(Request("a", [], 4))
    assert refused.value.field == "prompt"


@pytest.mark.parametrize("token", [-1, 256])
def test_a_token_id_the_model_has_not_is_refused(token, tiny):
    with pytest.raises(RequestError) as refused:
        Engine(tiny("qwen3")).check(Request("a", [3, token], 4))
    assert refused.value.field == "prompt"
    assert "255" in refused.value.message


def test_what_the_kv_memory_can_never_hold_is_refused(build, byte_tokenizer, prompt):
    model = Model(build("qwen3", max_position_embeddings=1024), byte_tokenizer, "qwen3")
    engine = Engine(model, kv_bytes=512 * 3 * 2 * 2 * 8 * 4)  # 512 positions of 3 layers x keys, values x 2 heads x 8
    engine.check(Request("fits", prompt(9), 500))
    with pytest.raises(RequestError) as refused:
        engine.check(Request("a", prompt(9), 600))
    assert refused.value.code == "kv_memory_exceeded"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_request_that_turns_non_finite_ends_alone_and_poisons_no_slot(
    value, attention, build, byte_tokenizer, prompt, alone, same_greedy, capturing
):
    model = Model(build("qwen3", attn_implementation=attention), byte_tokenizer, "qwen3")
    neighbours = [without_rare(prompt, length) for length in (3, 24, 8, 4)]
    wants = [alone(model, p, 12) for p in neighbours]
    assert all(RARE not in want for want in wants)
    engine = Engine(model, max_running=4)

    def serve(place):
        """A broken request among sound ones; the last of them takes the slot that it leaves."""
        requests = [Request(str(i), p, 12) for i, p in enumerate(neighbours)]
        broken = capturing(model, "broken", [5, RARE, *range(10, 40)], 12, points=["norm.output"])
        requests.insert(place, broken)
        done = engine.generate(requests)
        return done.pop(place), done

    with embedding_breaks(model, RARE, value):
        for place in (3, 0, 1):
            broken, sound = serve(place)
            assert (broken.reason, broken.captured) == ("error", None)
            assert "not finite" in broken.error
            for p, want, finished in zip(neighbours, wants, sound, strict=True):
                assert same_greedy(model, p, finished.tokens, want)
    healed, _ = serve(0)
    assert healed.reason in ("stop", "length")


def test_a_request_that_turns_non_finite_midway_leaves_its_neighbours_as_they_were(
    build, byte_tokenizer, prompt, alone, same_greedy, drain, endings
):
    model = Model(build("qwen3"), byte_tokenizer, "qwen3")
    texts = {seed: (prompt(6, seed), alone(model, prompt(6, seed), 12)) for seed in range(12)}
    # One whose third token no other text has: its embedding breaks the one request, three tokens on.
    victim, culprit = next(
        (seed, tokens[2])
        for seed, (_, tokens) in texts.items()
        if len(tokens) == 12 and all(tokens[2] not in [*p, *t] for s, (p, t) in texts.items() if s != seed)
        if tokens[2] not in [*texts[seed][0], *tokens[:2]]
    )
    engine = Engine(model)
    for seed, (ids, _) in texts.items():
        engine.submit(Request(str(seed), ids, 12))
    with embedding_breaks(model, culprit, torch.nan):
        events = drain(engine)
    done = endings(events)
    broken = done.pop(str(victim))
    assert broken.reason == "error"
    assert list(broken.tokens) == texts[victim][1][:3]
    assert len([event for event in events if isinstance(event, Delta) and event.id == str(victim)]) == 3
    for id, finished in done.items():
        assert same_greedy(model, texts[int(id)][0], finished.tokens, texts[int(id)][1])


def test_a_forward_that_fails_ends_its_requests_and_the_engine_goes_on(build, byte_tokenizer, prompt, alone):
    model = Model(build("qwen3"), byte_tokenizer, "qwen3")
    engine = Engine(model)

    def fail(*_):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    hook = model.hf.get_submodule("model.layers.1.mlp").register_forward_pre_hook(fail)
    failed = engine.generate([Request("a", prompt(5), 4), Request("b", prompt(9), 4)])
    hook.remove()
    assert [finished.reason for finished in failed] == ["error", "error"]
    assert all("9 GiB" in finished.error for finished in failed)
    (after,) = engine.generate([Request("c", prompt(5), 4)])
    assert list(after.tokens) == alone(model, prompt(5), 4)


def test_a_decode_that_fails_ends_its_requests_and_leaves_no_rows_behind(
    build, byte_tokenizer, prompt, capturing, lone_values, assert_rows_close, drain, endings
):
    model = Model(build("qwen3"), byte_tokenizer, "qwen3")
    engine = Engine(model)
    request = capturing(model, "a", prompt(5), 8, points=["layers.*.output"])
    engine.submit(request)
    engine.step()
    engine.step()

    def fail(*_):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    hook = model.hf.get_submodule("model.layers.1.mlp").register_forward_pre_hook(fail)
    assert endings(engine.step())["a"].reason == "error"
    hook.remove()
    (after,) = engine.generate([request])
    want = lone_values(model, [*request.prompt, *after.tokens], request.points)
    for point, value in after.captured.values.items():
        assert_rows_close(value, want[point], point)
