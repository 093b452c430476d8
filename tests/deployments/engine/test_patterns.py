"""Attention patterns equal transformers' `output_attentions`, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from deployments.engine.capture.row_sizes import RowSizes
from deployments.engine.engine import Engine
from deployments.engine.request import Finished, Rows
from deployments.errors import RequestError
from deployments.model.model import Model
from deployments.points.capture import Capture
from deployments.points.patterns import keys
from deployments.points.token_choices import Tokens, resolve

EVERY = ["layers.*.attention.weights"]
WEIGHTS = [f"layers.{i}.attention.weights" for i in range(3)]


@torch.inference_mode()
def shown(model, tokens):
    """Point -> [heads, tokens, tokens] of transformers' own forward."""
    ids = torch.tensor([list(tokens)], device=model.device)
    found = model.hf(input_ids=ids, use_cache=False, output_attentions=True).attentions
    return {name: weights[0].cpu() for name, weights in zip(WEIGHTS, found, strict=True)}


def assert_shown(model, request, finished, tolerance=1e-4):
    """All rows of all points are those of a lone forward, each as wide as what its token sees."""
    want = shown(model, [*request.prompt, *finished.tokens])
    positions = finished.captured.positions
    assert finished.captured.values.keys() == {point.name for point in request.points}
    for name, patterns in finished.captured.values.items():
        assert len(patterns) == len(positions)
        for k, row in zip(positions, patterns, strict=True):
            assert not want[name][:, k, k + 1 :].any()
            torch.testing.assert_close(row.float(), want[name][:, k, : k + 1].float(), rtol=0, atol=tolerance)


def test_where_a_window_cuts_stand_zeros_and_rows_sum_to_one(tiny, prompt, capturing):
    model = tiny("qwen3_windows", attn_implementation="eager")  # five tokens, from the second layer on
    (finished,) = Engine(model).generate([capturing(model, "a", prompt(20), 12, points=EVERY)])
    for name, patterns in finished.captured.values.items():
        for k, row in enumerate(patterns):
            torch.testing.assert_close(row.sum(-1), torch.ones(4))
            assert bool((row[:, : max(0, k - 4)] == 0).all()) == (name != WEIGHTS[0] or k < 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_patterns_come_in_the_dtype_asked_for(dtype, tiny, prompt, capturing):
    model = tiny("llama", attn_implementation="eager")
    request = capturing(model, "a", prompt(9), 5, points=EVERY, dtype=dtype)
    (finished,) = Engine(model).generate([request])
    assert {patterns.dtype for patterns in finished.captured.values.values()} == {getattr(torch, dtype)}
    assert_shown(model, request, finished, tolerance=5e-3)


def test_rows_leave_while_their_request_runs_and_memory_holds_a_share_of_them(tiny, prompt, capturing):
    model = tiny("qwen3", attn_implementation="eager", max_position_embeddings=1024)
    share, prompts, new = 100_000, 100, 150
    engine = Engine(model, capture_bytes=share)
    requests = [capturing(model, str(i), prompt(prompts, i), new, points=EVERY) for i in range(2)]
    row = 3 * 4 * (prompts + new) * 4  # bytes of the widest
    held, unwritten, taken = 0, [], {request.id: 0 for request in requests}
    for request in requests:
        engine.submit(request)
    for step in range(3000):
        for event in engine.step():
            if isinstance(event, (Rows, Finished)) and event.captured:
                unwritten.append((event.id, event.captured.bytes))
                taken[event.id] += event.captured.bytes
        held = max(held, engine.statistics.capture_bytes)
        if unwritten and step % 3 == 0:  # a slow disk
            engine.written(*unwritten.pop(0))
    tokens = prompts + new
    assert taken == {request.id: 3 * 4 * 4 * tokens * (tokens + 1) // 2 for request in requests}  # 1.5 MB each
    assert share // 2 < held < share + 32 * row  # a prefill has 32 tokens, or as many as fit


@pytest.mark.parametrize("last", [1, 7, 40])
def test_of_the_last_rows_no_more_is_held_than_is_reserved_for_them(last, tiny, prompt, capturing):
    model = tiny("qwen3", attn_implementation="eager")
    request = capturing(model, "a", prompt(30), 60, points=EVERY, tokens={"last": last})
    engine = Engine(model, prefill_tokens=16, capture_bytes=1 << 20)
    engine.submit(request)
    held, finished = 0, None
    while finished is None:
        finished = next((event for event in engine.step() if isinstance(event, Finished)), None)
        held = max(held, engine.statistics.capture_bytes)
    tokens = 30 + len(finished.tokens)
    assert finished.captured.positions == range(tokens - last, tokens)
    assert finished.captured.bytes == 3 * 4 * 4 * keys(range(tokens - last, tokens))
    assert held <= RowSizes.bytes(request.capture, request.points).until_end(resolve(request.capture.tokens, 1, ""), 90)
    assert_shown(model, request, finished)


def test_bytes_and_numbers_of_rows_are_counted_by_the_tokens_they_see(tiny):
    model = tiny("qwen3", attn_implementation="eager")
    capture = Capture(points=[*EVERY, "layers.0.output"], dtype="bfloat16", tokens={"last": 3})
    points = model.points.resolve(capture)
    assert RowSizes.numbers(capture, points).of(range(7, 10)) == 3 * 4 * (8 + 9 + 10) + 3 * 32
    assert RowSizes.bytes(capture, points).of(range(7, 10)) == 4 * (3 * 4 * (8 + 9 + 10) + 3 * 32)
    assert keys(range(0)) == keys(range(5, 5)) == 0
    assert RowSizes.bytes(capture, points).until_end(Tokens(tail=3), 5) == 4 * (3 * 4 * keys(range(5)) + 5 * 32)
    assert RowSizes.bytes(capture, points).until_end(Tokens(tail=3), 90) == 4 * (3 * 4 * keys(range(84, 90)) + 70 * 32)


def test_a_forward_that_gives_no_patterns_fails_the_captures_of_them_alone(
    build, byte_tokenizer, prompt, capturing, drain, endings
):
    model = Model(build("qwen3", attn_implementation="eager"), byte_tokenizer, "qwen3")
    engine = Engine(model)
    engine.submit(capturing(model, "patterns", prompt(5), 6, points=EVERY))
    engine.submit(capturing(model, "other", prompt(5), 6, points=["layers.1.output"]))
    engine.step()
    attention = model.hf.get_submodule("model.layers.1.self_attn")
    hook = attention.register_forward_hook(lambda _module, _args, output: (output[0], None), prepend=True)
    done = endings(drain(engine))
    hook.remove()
    assert done["patterns"].tokens == done["other"].tokens
    assert done["patterns"].captured is None
    assert "did not run model.layers.1.self_attn.weights" in done["patterns"].error
    assert len(done["other"].captured.positions) == 11


def refusal(model, **capture):
    with pytest.raises(RequestError) as refused:
        model.points.resolve(Capture(**capture))
    assert refused.value.status == 400
    return refused.value


def test_outside_of_the_registry_the_refusal_says_how_the_operator_gets_patterns(tiny):
    falcon = tiny("falcon_parallel")
    error = refusal(falcon, points=["norm.output", "layers.-1.attention.weights"])
    assert (error.field, error.code) == ("capture.points[1]", "no_attention_patterns")
    assert "attention=eager" in error.message
    assert "sdpa" in error.message
    assert refusal(falcon, layers=[1], sites=["attention.weights"]).code == "no_attention_patterns"


def test_a_layer_whose_attention_gives_none_is_refused_by_its_module(build, byte_tokenizer):
    hf = build("llama", attn_implementation="eager")
    attention = hf.model.layers[1].self_attn
    attention.register_forward_hook(lambda _module, _args, output: (output[0], None))
    model = Model(hf, byte_tokenizer, "llama")
    assert [point.name for point in model.points if point.place.grows] == [WEIGHTS[0], WEIGHTS[2]]
    error = refusal(model, points=[WEIGHTS[0], WEIGHTS[1]])
    assert (error.field, error.code) == ("capture.points[1]", "no_attention_patterns")
    assert "model.layers.1.self_attn" in error.message
    assert "eager" not in error.message


@pytest.mark.parametrize("spoil", [lambda w: w * 2, lambda w: w.flip(-1), lambda w: w[:, :, :, :3]])
def test_what_does_not_sum_to_one_over_the_tokens_seen_is_no_pattern(spoil, build, byte_tokenizer):
    hf = build("llama", attn_implementation="eager")
    for layer in hf.model.layers:
        layer.self_attn.register_forward_hook(lambda _module, _args, output: (output[0], spoil(output[1])))
    model = Model(hf, byte_tokenizer, "llama")
    assert not any(point.place.grows for point in model.points)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["layers.*.attention.weights", "model.layers.0.self_attn.weights"])
def test_patterns_cannot_be_changed_and_the_refusal_names_what_can(attention, name, tiny):
    with pytest.raises(RequestError) as refused:
        tiny("llama", attn_implementation=attention).points.named(name, "interventions[0].point")
    assert refused.value.field == "interventions[0].point"
    assert "layers.{i}.attention.heads" in refused.value.message
