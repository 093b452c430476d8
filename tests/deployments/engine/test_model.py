"""Which models are served; a model that cannot be served exactly is rejected when it is loaded."""

from functools import partial

import pytest
import torch

from deployments.engine.engine import Engine
from deployments.model import kv_cache, native
from deployments.model.attention import registration
from deployments.model.model import Model
from deployments.model.packing import UnsupportedModelError
from deployments.model.validate import validate


@pytest.mark.parametrize(
    ("architecture", "context", "reason"),
    [
        ("phi3_longrope", 64, "set max_seq_len=32"),  # the longest row would turn all rows' positions
        ("bloom", None, "set one with max_seq_len"),  # its config states none
    ],
)
def test_what_cannot_be_served_exactly_is_refused_at_load(architecture, context, reason, build, byte_tokenizer):
    with pytest.raises(UnsupportedModelError, match=reason):
        Model(build(architecture), byte_tokenizer, architecture, context=context)


@pytest.mark.parametrize("architecture", ["gemma3", "llama", "llama4"])  # a llama has none, whatever its config says
def test_windows_are_the_models_own_though_the_probe_is_shorter(
    architecture, build, byte_tokenizer, prompt, capturing, lone_values
):
    model = Model(build(architecture, sliding_window=16), byte_tokenizer, architecture)
    assert model.hf.config.sliding_window == 16
    requests = [capturing(model, str(length), prompt(length), 8, points=["lm_head.output"]) for length in (40, 12)]
    for request, finished in zip(requests, Engine(model, prefill_tokens=16).generate(requests), strict=True):
        want = lone_values(model, [*request.prompt, *finished.tokens], request.points)
        torch.testing.assert_close(finished.captured.values, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("owner", "name"), [(registration, "_chunk_of"), (kv_cache.PagedCache, "get_seq_length")])
def test_the_probe_shows_what_only_long_prompts_would(owner, name, build, byte_tokenizer, monkeypatch):
    hf = build("llama4", attention_chunk_size=8192, floor_scale=8192)
    assert Model(hf, byte_tokenizer, "llama4").packs
    monkeypatch.setattr(owner, name, lambda *_: 0)
    assert not Model(hf, byte_tokenizer, "llama4").packs


def test_a_model_that_selects_keys_is_not_packed(build, byte_tokenizer):
    hf = build("llama")
    hf.forward = partial(hf.forward, indices=torch.zeros(1))  # transformers' own attention does not read them
    assert not Model(hf, byte_tokenizer, "llama").packs


def test_length_dependent_rotary_embeddings_are_served_within_their_first_regime(build, byte_tokenizer):
    report = validate(Model(build("phi3_longrope"), byte_tokenizer, "phi3", context=32))
    assert report.ok, report.text()


def test_a_model_without_a_fast_tokenizer_is_refused(build):
    with pytest.raises(UnsupportedModelError, match="fast tokenizer"):
        Model(build("llama"), None, "llama")


def test_a_shorter_context_may_be_asked_for_but_not_a_longer_one(build, byte_tokenizer):
    hf = build("llama")
    assert Model(hf, byte_tokenizer, "llama", context=40).context == 40
    assert Model(hf, byte_tokenizer, "llama", context=4000).context == hf.config.max_position_embeddings


@pytest.mark.parametrize("architecture", ["gemma2", "llama4", "deepseek_v3", "diffllama"])
def test_without_a_compiler_torchs_operations_give_the_same(architecture, build, byte_tokenizer, monkeypatch):
    monkeypatch.setattr(kv_cache, "attention_kernel", lambda _: None)
    report = validate(Model(build(architecture), byte_tokenizer, architecture))
    assert report.served == "together"
    assert report.ok, report.text()


@pytest.mark.cpu
def test_a_compiler_that_fails_is_said_and_torch_stands_in(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ("--no-such-flag",))
    assert native._library.__wrapped__(torch.float32) is None
    assert "no-such-flag" in caplog.text
