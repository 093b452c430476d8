"""The smallest, the largest and invalid requests, and errors that end a single request."""

from dataclasses import replace

import pytest

from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Request
from deployments.errors import RequestError
from deployments.model.model import Model

SIZES = [(1, 0), (1, 1), (1, 95), (40, 0), (40, 1), (40, 56), (95, 0), (95, 1), (96, 0)]  # of prompt and answer


@pytest.mark.parametrize("prefill_tokens", [4096, 16])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])  # in gemma3 all but the first few are beyond a window
def test_every_size_up_to_the_whole_context_is_served(
    name, prefill_tokens, tiny, prompt, capturing, lone_values, assert_rows_close
):
    model = tiny(name)
    asked = [
        capturing(model, f"{length}+{new}", prompt(length), new, points=["layers.*.output", "lm_head.output"])
        for length, new in SIZES
    ]
    requests = [replace(request, ignore_eos=True) for request in asked]
    engine = Engine(model, prefill_tokens=prefill_tokens)
    for request in requests:
        engine.check(request)
    for request, finished in zip(requests, engine.generate(requests), strict=True):
        assert finished.reason == "length"
        assert len(finished.tokens) == request.max_tokens
        for point, want in lone_values(model, [*request.prompt, *finished.tokens], request.points).items():
            assert_rows_close(finished.captured.values[point], want, f"{request.id} {point}")
        logits = finished.captured.values["lm_head.output"][len(request.prompt) - 1 :]
        assert logits.argmax(dim=-1).tolist()[: request.max_tokens] == list(finished.tokens)


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


@pytest.mark.parametrize(
    ("ids", "max_tokens", "field"),
    [([3], -1, "max_tokens"), ([], 4, "prompt"), ([3, -1], 4, "prompt"), ([3, 256], 4, "prompt")],
)
def test_what_no_model_can_run_is_refused_by_its_field(ids, max_tokens, field, tiny):
    with pytest.raises(RequestError) as refused:
        Engine(tiny("qwen3")).check(Request("a", ids, max_tokens))
    assert refused.value.field == field


def test_what_the_kv_memory_can_never_hold_is_refused(build, byte_tokenizer, prompt):
    model = Model(build("qwen3", max_position_embeddings=1024), byte_tokenizer, "qwen3")
    engine = Engine(model, kv_bytes=512 * KvMemory(model, 1, kv_bytes=1).position_bytes)
    engine.check(Request("fits", prompt(9), 500))
    with pytest.raises(RequestError) as refused:
        engine.check(Request("a", prompt(9), 600))
    assert refused.value.code == "kv_memory_exceeded"


def test_no_forward_takes_more_prompt_tokens_than_set(tiny, prompt, capturing):
    model, sizes = tiny("qwen3"), []
    hook = model.hf.get_input_embeddings().register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    plain = [Request(str(length), prompt(length), 8) for length in (40, 3, 2, 9, 5)]
    recording = [capturing(model, f"r{length}", prompt(length), 8, points=["norm.output"]) for length in (30, 4, 2)]
    try:
        Engine(model, prefill_tokens=12, capture_bytes=1 << 16).generate([*plain, *recording])
    finally:
        hook.remove()
    decoding = len(plain) + len(recording)
    assert 12 <= max(sizes) < 12 + decoding
