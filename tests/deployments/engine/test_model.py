"""Which models are served, and that what cannot be served exactly is refused at load."""

import pytest
import torch

from deployments.demo_model import WEIGHTS
from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.model.load import load
from deployments.model.mask_search import UnsupportedModelError
from deployments.model.model import Model


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("falcon_alibi", "cannot be batched exactly"),  # ALiBi takes no mask of its own per row
        ("bloom", "cannot be batched exactly"),
        ("gpt_neo", "window_size"),  # it cuts its windows by the batch's longest row
        ("phi3_longrope", "with a context of 32"),  # the longest row would turn all rows' positions
    ],
)
def test_what_cannot_be_batched_exactly_is_refused_at_load(architecture, reason, build, byte_tokenizer):
    with pytest.raises(UnsupportedModelError, match=reason):
        Model(build(architecture), byte_tokenizer, architecture, context=64)


@pytest.mark.parametrize("architecture", ["mamba", "qwen3_next"])
def test_a_recurrent_model_is_refused_at_load_with_the_reason(architecture, build, byte_tokenizer):
    with pytest.raises(UnsupportedModelError, match="its layers keep a recurrent"):
        Model(build(architecture), byte_tokenizer, architecture)


def test_a_model_of_layers_without_known_masks_is_refused_by_their_kinds(build, byte_tokenizer):
    hf = build("llama")
    hf.config.layer_types = ["chunked_attention", "full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedModelError, match="of the kinds chunked_attention, full_attention"):
        Model(hf, byte_tokenizer, "llama")


@pytest.mark.parametrize("architecture", ["gemma3", "llama"])  # a llama has none, whatever its config says
def test_windows_are_the_models_own_though_the_probe_is_shorter(
    architecture, build, byte_tokenizer, prompt, capturing, lone_values
):
    model = Model(build(architecture, sliding_window=16), byte_tokenizer, architecture)
    assert model.hf.config.sliding_window == 16
    requests = [capturing(model, str(length), prompt(length), 8, points=["lm_head.output"]) for length in (40, 12)]
    for request, finished in zip(requests, Engine(model, prefill_tokens=16).generate(requests), strict=True):
        want = lone_values(model, [*request.prompt, *finished.tokens], request.points)
        torch.testing.assert_close(finished.captured.values, want, rtol=1e-3, atol=1e-3)


def test_a_model_without_a_stated_context_is_refused_until_one_is_given(build, byte_tokenizer):
    with pytest.raises(UnsupportedModelError, match="context"):
        Model(build("bloom"), byte_tokenizer, "bloom")


def test_length_dependent_rotary_embeddings_are_served_within_their_first_regime(
    build, byte_tokenizer, prompt, alone, same_greedy
):
    model = Model(build("phi3_longrope"), byte_tokenizer, "phi3", context=32)
    prompts = [prompt(length) for length in (3, 22, 9)]
    done = Engine(model).generate([Request(str(i), p, max_tokens=10) for i, p in enumerate(prompts)])
    assert all(
        same_greedy(model, p, finished.tokens, alone(model, p, 10)) for p, finished in zip(prompts, done, strict=True)
    )


def test_a_model_without_a_fast_tokenizer_is_refused(build):
    with pytest.raises(UnsupportedModelError, match="fast tokenizer"):
        Model(build("llama"), None, "llama")


def test_a_shorter_context_may_be_asked_for_but_not_a_longer_one(build, byte_tokenizer):
    hf = build("llama")
    assert Model(hf, byte_tokenizer, "llama", context=40).context == 40
    assert Model(hf, byte_tokenizer, "llama", context=4000).context == hf.config.max_position_embeddings


def test_the_model_that_ships_loads_with_its_end_tokens(demo):
    assert demo.name == str(WEIGHTS)
    assert demo.tokenizer.eos_token_id in demo.eos
    assert demo.context >= 2048


def test_a_directory_that_is_not_there_raises_an_os_error(tmp_path):
    with pytest.raises(OSError, match="missing"):
        load(str(tmp_path / "missing"))


def test_float16_models_are_served(build, byte_tokenizer, prompt):
    model = Model(build("qwen3", torch.float16), byte_tokenizer, "qwen3")
    done = Engine(model).generate([Request(str(n), prompt(n), max_tokens=4) for n in (2, 9, 5)])
    assert [(finished.reason, finished.error) for finished in done] == [("length", None)] * 3
