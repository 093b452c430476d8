"""Captured rows equal those of a plain forward, for every token and whatever else is in the batch."""

from dataclasses import replace

import pytest
import torch

from deployments.engine.capture import ring
from deployments.engine.engine import Engine
from deployments.engine.request import Finished, Request, Rows
from deployments.model.model import Model


@pytest.mark.parametrize("point", ["layers.1.output", "layers.1.attention.heads"])
@pytest.mark.parametrize(("features", "index"), [({"first": 3}, [0, 1, 2]), ({"index": [7, 0, 5]}, [7, 0, 5])])
def test_the_features_asked_for_are_kept_in_the_order_asked(
    point, features, index, tiny, prompt, capturing, lone_values
):
    model = tiny("qwen3")
    request = capturing(model, "a", prompt(8), 4, points=[point], features=features)
    (finished,) = Engine(model).generate([request])
    want = lone_values(model, [*request.prompt, *finished.tokens], request.points)[point]
    torch.testing.assert_close(finished.captured.values[point], want[..., index], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_come_in_the_dtype_asked_for(dtype, tiny, prompt, capturing):
    model = tiny("qwen3")
    exact, cast = Engine(model).generate(
        [
            capturing(model, "exact", prompt(8), 4, points=["layers.1.output"]),
            capturing(model, "cast", prompt(8), 4, points=["layers.1.output"], dtype=dtype),
        ]
    )
    (exact,), (cast,) = exact.captured.values.values(), cast.captured.values.values()
    assert cast.dtype == getattr(torch, dtype)
    torch.testing.assert_close(cast, exact.to(cast.dtype), rtol=2e-2, atol=1e-3)


def test_the_models_own_dtype_comes_bit_exact(build, byte_tokenizer, prompt, capturing):
    model = Model(build("qwen3").to(torch.bfloat16), byte_tokenizer, "qwen3")
    request = capturing(model, "a", prompt(8), 0, points=["layers.*.output"])
    engine, seen = Engine(model), []
    keep = lambda _, args, output: seen.append(output.to("cpu", copy=True))  # noqa: E731
    hooks = [layer.register_forward_hook(keep) for layer in model.hf.model.layers]
    (finished,) = engine.generate([request])
    for hook in hooks:
        hook.remove()
    for value, want in zip(finished.captured.values.values(), seen, strict=True):
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, want[0])


def test_values_beyond_float16_are_refused_by_name_and_the_request_still_finishes(
    build, byte_tokenizer, prompt, capturing
):
    hf = build("llama")
    hf.get_input_embeddings().weight.data.mul_(1e7)
    model = Model(hf, byte_tokenizer, "loud")
    refused, kept = Engine(model).generate(
        [
            capturing(model, "half", prompt(6), 5, points=["embed.output"], dtype="float16"),
            capturing(model, "brain", prompt(6), 5, points=["embed.output"], dtype="bfloat16"),
        ]
    )
    assert refused.reason == kept.reason == "length"
    assert len(refused.tokens) == 5
    assert refused.captured is None
    assert "embed.output" in refused.error
    assert "float16" in refused.error
    assert kept.captured.values["embed.output"].isfinite().all()


@pytest.mark.parametrize("ends_by", ["eos", "stop string"])
def test_a_text_that_ends_early_has_rows_for_its_tokens_alone(ends_by, tiny, ending_prompt, capturing):
    model = tiny("qwen3")
    request = capturing(model, "a", ending_prompt, 20, points=["lm_head.output"])
    if ends_by == "stop string":
        request = replace(request, ignore_eos=True, max_tokens=80, stop=tuple(map(chr, range(33, 127))))
    (finished,) = Engine(model).generate([request])
    assert finished.reason == "stop"
    assert len(finished.tokens) < request.max_tokens
    assert len(finished.captured.values["lm_head.output"]) == len(ending_prompt) + len(finished.tokens)


def test_a_long_generation_keeps_every_row_in_its_place(build, byte_tokenizer, prompt, capturing, lone_values):
    model = Model(build("qwen3", max_position_embeddings=512), byte_tokenizer, "qwen3")
    requests = [
        capturing(model, f"{tokens}", prompt(5 + i), 150 + 40 * i, points=["layers.*.output"], tokens=tokens)
        for i, tokens in enumerate(["all", "generated"])
    ]
    requests.append(capturing(model, "tail", prompt(9), 170, points=["layers.1.output"], tokens={"last": 4}))
    for request, finished in zip(requests, Engine(model).generate(requests), strict=True):
        rows = finished.captured.positions
        want = lone_values(model, [*request.prompt, *finished.tokens], request.points)
        for point, value in finished.captured.values.items():
            torch.testing.assert_close(value, want[point][rows.start : rows.stop], rtol=1e-3, atol=1e-3)


def test_with_little_memory_for_rows_they_go_out_while_their_request_decodes(tiny, prompt, capturing, monkeypatch):
    monkeypatch.setattr(ring, "WINDOW_BYTES", 4 << 10)
    monkeypatch.setattr(ring, "GPU_PART", 1 << 60)  # on a GPU as on a CPU
    model = tiny("qwen3")
    engine = Engine(model, capture_bytes=16 << 10)
    request = capturing(model, "a", prompt(5), 60, points=["layers.*.output"])
    engine.submit(replace(request, ignore_eos=True))
    parts, end = [], None
    while end is None:
        for event in engine.step():
            if isinstance(event, Rows):
                parts.append(event.captured)
                engine.written("a", event.captured.bytes)
            elif isinstance(event, Finished):
                end = event.captured
    assert parts
    assert all(part.bytes <= 16 << 10 for part in (*parts, end))
    assert [position for part in (*parts, end) for position in part.positions] == [*range(65)]


def test_a_module_that_a_forward_leaves_out_fails_the_captures_of_it_alone(
    build, byte_tokenizer, prompt, capturing, drain, endings, alone, monkeypatch
):
    model = Model(build("qwen3"), byte_tokenizer, "qwen3")
    want = alone(model, prompt(5), 6)
    engine = Engine(model, fixed_memory=False)
    engine.submit(capturing(model, "left out", prompt(5), 6, points=["layers.1.mlp.output"]))
    engine.submit(capturing(model, "other", prompt(5), 6, points=["layers.1.output"]))
    engine.step()
    layer = model.hf.get_submodule("model.layers.1")
    monkeypatch.setitem(layer.__dict__, "mlp", layer.mlp.forward)  # past the module's hooks
    done = endings(drain(engine))
    assert list(done["left out"].tokens) == list(done["other"].tokens) == want
    assert done["left out"].captured is None
    assert "did not run model.layers.1.mlp" in done["left out"].error
    assert len(done["other"].captured.positions) == 11


def test_a_text_that_is_complete_stays_so_where_its_last_row_is_not_finite(build, byte_tokenizer, prompt, capturing):
    model = Model(build("qwen3"), byte_tokenizer, "qwen3")
    engine = Engine(model)
    request = capturing(model, "a", prompt(5), 3, points=["layers.1.output"])
    (sound,) = engine.generate([request])

    def spoil(_module, args, output):
        return output.fill_(torch.nan) if args[0].flatten().tolist() == [sound.tokens[-1]] else output

    hook = model.hf.get_input_embeddings().register_forward_hook(spoil)
    (finished,) = engine.generate([request])
    hook.remove()
    assert (finished.reason, finished.error, finished.tokens) == ("length", None, sound.tokens)
    (rows,) = finished.captured.values.values()
    assert rows[:-1].isfinite().all()
    assert rows[-1].isnan().all()


def test_requests_for_last_rows_wait_until_their_rows_have_room(tiny, prompt, capturing):
    model = tiny("qwen3")
    engine = Engine(model, capture_bytes=160_000)
    for i in range(4):  # each holds the last 100 rows at most, and all together more than there is room for
        engine.submit(capturing(model, str(i), prompt(5 + i), 60, points=["layers.*.output"], tokens={"last": 90}))
    done: dict[str, int] = {}
    held = most = 0
    for _ in range(4 * 80):
        for event in engine.step():
            if isinstance(event, Finished):
                done[event.id] = len(event.captured.positions)
                engine.written(event.id, event.captured.bytes)
        held = max(held, engine.statistics.capture_bytes)
        most = max(most, engine.statistics.running)
    assert done == {str(i): 65 + i for i in range(4)}
    assert 0 < held <= 160_000
    assert 1 < most < 4


def test_tokens_by_their_positions_are_recorded_wherever_they_fall(tiny, prompt, capturing, lone_values):
    """In a chunk of the prompt, behind a preemption, among the generated ones, or not at all."""
    model, few = tiny("qwen3"), [31, 2, 17, 30, 33, 80]
    requests = [
        capturing(model, str(i), prompt(length, i), 12, points=["layers.*.output"], tokens={"positions": few})
        for i, length in enumerate((30, 20, 3))
    ]
    heads = capturing(model, "heads", prompt(30), 4, points=["layers.1.attention.heads"], tokens="prompt_last")
    heads = replace(heads, capture=heads.capture.model_copy(update={"heads": [3, 1]}))
    *done, one = Engine(model, max_running=2, prefill_tokens=8, capture_bytes=1 << 20).generate([*requests, heads])
    for request, finished in zip(requests, done, strict=True):
        sequence = [*request.prompt, *finished.tokens]
        there = [position for position in sorted(few) if position < len(sequence)]
        assert list(finished.captured.positions) == there
        assert list(finished.captured.token_ids) == [sequence[position] for position in there]
        for name, want in lone_values(model, sequence, request.points).items():
            torch.testing.assert_close(finished.captured.values[name], want[there], rtol=1e-3, atol=1e-4)
    want = lone_values(model, heads.prompt, heads.points)["layers.1.attention.heads"]
    torch.testing.assert_close(one.captured.values["layers.1.attention.heads"], want[-1:, [3, 1]], rtol=1e-3, atol=1e-4)


def test_prompts_that_record_different_rows_and_points_share_forwards(
    tiny, prompt, capturing, lone_values, assert_rows_close, caplog
):
    model = tiny("gemma2")
    layers, mixed = ["layers.*.output"], ["layers.1.mlp.output", "layers.*.attention.heads", "lm_head.output"]
    asked = [
        (30, layers, "all"),
        (11, layers, "last"),
        (23, layers, {"positions": [3, 21, 22]}),
        (1, layers, "all"),
        (40, layers, {"positions": [38]}),
        (17, mixed, "all"),
        (25, mixed, "last"),
        (9, [*layers, "layers.2.attention.weights"], "all"),  # the last: its values are compared by row
    ]
    requests = [
        capturing(model, str(i), prompt(n), 0, points=points, tokens=tokens, mode="trace")
        for i, (n, points, tokens) in enumerate(asked)
    ]
    done = Engine(model, prefill_tokens=20).generate([*requests, Request("plain", prompt(15, 1), 3)])
    for request, finished in zip(requests, done, strict=False):
        want = lone_values(model, request.prompt, request.points)
        for point, value in finished.captured.values.items():
            positions = finished.captured.positions
            assert_rows_close(value, want[point] if request is requests[-1] else want[point][list(positions)], point)
    assert not caplog.records  # of failed forwards, after which sequences run again
