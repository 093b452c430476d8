"""Which models are served, and that what cannot be served exactly is refused at load."""

import pytest
import torch

from deployments.demo_model import WEIGHTS
from deployments.engine.engine import Engine
from deployments.engine.model import Model, UnsupportedModelError, load
from deployments.engine.request import Request

SERVED = [
    "qwen3",
    "qwen3_windows",
    "qwen3_moe",
    "qwen2",
    "llama",
    "gpt2",
    "gpt_neox",
    "gpt_neox_sequential",
    "mistral",
    "gemma2",
    "gemma3",
    "opt",
    "opt_norms_behind",
    "phi3",
    "olmo2",
    "exaone4",
    "falcon_parallel",
    "falcon_two_norms",
    "falcon_sequential",
]


@pytest.mark.parametrize("architecture", SERVED)
def test_every_architecture_gives_generates_greedy_tokens_in_mixed_company(
    architecture, tiny, prompt, alone, same_greedy
):
    model = tiny(architecture)
    prompts = [prompt(length) for length in (1, 23, 4, 12, 7)]
    engine = Engine(model, max_running=3)
    done = engine.generate([Request(str(i), p, max_tokens=10) for i, p in enumerate(prompts)])
    for p, finished in zip(prompts, done, strict=True):
        assert same_greedy(model, p, finished.tokens, alone(model, p, 10))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("falcon_alibi", "cannot be batched exactly"),  # ALiBi takes no mask of its own per row
        ("bloom", "cannot be batched exactly"),
        ("gpt_neo", "logits differ from a lone forward's"),  # its windows stand in no field of the config
        ("phi3_longrope", "with a context of 32"),  # the longest row would turn all rows' positions
    ],
)
def test_what_cannot_be_batched_exactly_is_refused_at_load(architecture, reason, build, byte_tokenizer):
    with pytest.raises(UnsupportedModelError, match=reason):
        Model(build(architecture), byte_tokenizer, architecture, context=64)


def test_a_state_space_model_is_refused_at_load(build, byte_tokenizer):
    with pytest.raises(UnsupportedModelError):
        Model(build("mamba"), byte_tokenizer, "mamba")


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_served(dtype, build, byte_tokenizer, prompt):
    model = Model(build("qwen3").to(dtype), byte_tokenizer, "qwen3")
    done = Engine(model).generate([Request(str(n), prompt(n), max_tokens=4) for n in (2, 9, 5)])
    assert [(finished.reason, finished.error) for finished in done] == [("length", None)] * 3
