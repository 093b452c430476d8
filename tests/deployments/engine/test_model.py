"""Which models are served; a model that cannot be served exactly is rejected when it is loaded."""

import pytest
import torch

from deployments.demo_model import WEIGHTS
from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.model import kv_cache, native
from deployments.model.load import load
from deployments.model.model import Model
from deployments.model.packing import UnsupportedModelError


@pytest.mark.parametrize(
    ("architecture", "context", "reason"),
    [
        ("phi3_longrope", 64, "set max_seq_len=32"),  # the longest row would turn all rows' positions
        ("mamba", None, "its layers keep a recurrent"),
        ("qwen3_next", None, "its layers keep a recurrent"),
        ("bloom", None, "set one with max_seq_len"),  # its config states none
    ],
)
def test_what_cannot_be_served_exactly_is_refused_at_load(architecture, context, reason, build, byte_tokenizer):
    with pytest.raises(UnsupportedModelError, match=reason):
        Model(build(architecture), byte_tokenizer, architecture, context=context)


@pytest.mark.parametrize("architecture", ["falcon_parallel", "falcon_alibi", "bloom", "gpt_neo"])
def test_a_model_whose_attention_cannot_be_packed_runs_one_sequence_at_a_time(
    architecture, build, byte_tokenizer, prompt, alone, same_greedy
):
    model = Model(build(architecture), byte_tokenizer, architecture, context=64)
    assert not model.packs
    prompts = [prompt(length) for length in (3, 40, 9)]
    engine = Engine(model, prefill_tokens=16)
    done = engine.generate([Request(str(i), p, max_tokens=20) for i, p in enumerate(prompts)])
    for p, finished in zip(prompts, done, strict=True):
        assert same_greedy(model, p, finished.tokens, alone(model, p, 20))


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


@pytest.mark.parametrize("architecture", ["qwen3_windows", "gemma2", "gpt2"])
def test_without_a_compiler_torchs_operations_give_the_same(
    architecture, build, byte_tokenizer, prompt, capturing, lone_values, assert_rows_close, monkeypatch
):
    monkeypatch.setattr(kv_cache, "attention_kernel", lambda _: None)
    model = Model(build(architecture), byte_tokenizer, architecture)
    assert model.packs
    points = ["layers.*.output", "layers.*.attention.weights"]
    requests = [capturing(model, str(n), prompt(n), 20, points=points) for n in (40, 1, 9, 23)]
    for request, done in zip(requests, Engine(model, prefill_tokens=16).generate(requests), strict=True):
        for point, want in lone_values(model, [*request.prompt, *done.tokens], request.points).items():
            assert_rows_close(done.captured.values[point], want, point)


@pytest.mark.cpu
def test_a_compiler_that_fails_is_said_and_torch_stands_in(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ("--no-such-flag",))
    assert native._library.__wrapped__(torch.float32) is None
    assert "no-such-flag" in caplog.text
