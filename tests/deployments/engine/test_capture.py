"""What is captured is what a plain forward shows, for every token and whoever shares the batch."""

from dataclasses import replace

import pytest
import torch

from deployments.engine.engine import Engine
from deployments.engine.model import Model
from deployments.engine.request import Request

CANONICAL = [
    "embed.output",
    "layers.*.input",
    "layers.*.output",
    "layers.*.attention.output",
    "norm.input",
    "norm.output",
    "lm_head.input",
    "lm_head.output",
]
NORMS = ["layers.*.input_layernorm.output", "layers.*.post_attention_layernorm.output"]
MLP = ["layers.*.mlp.input", "layers.*.mlp.output"]
HEADS = ["layers.*.attention.heads"]
ALL = [*CANONICAL, *NORMS, *MLP, *HEADS]
LAYERS = {
    "qwen3": [*ALL, "model.layers.1.self_attn.q_proj.output", "model.layers[-1].mlp.act_fn.output", "model.norm.input"],
    "demo": [*ALL, "model.layers.2.self_attn.o_proj.input", "model.layers[-1].self_attn.k_norm.output"],
    "qwen3_windows": ALL,
    "qwen3_moe": [*ALL, "model.layers.1.mlp.gate.output"],  # a router sees [batch * tokens, ...]
    "qwen2": ALL,
    "llama": [*ALL, "model.layers.0.self_attn.v_proj.output"],
    "gpt2": [*ALL, "transformer.h.1.attn.c_attn.output", "transformer.h[-1].mlp.c_fc.output"],
    "gpt_neox": [*ALL, "gpt_neox.layers.1.attention.query_key_value.output"],
    "gpt_neox_sequential": ALL,
    "mistral": ALL,
    "gemma2": [*ALL, "model.layers.1.post_feedforward_layernorm.output"],
    "gemma3": [*ALL, "model.layers.1.post_feedforward_layernorm.output"],
    "opt": [*CANONICAL, *NORMS, *HEADS, "model.decoder.layers.1.fc1.output", "model.decoder.layers.1.fc2.output"],
    "phi3": [*ALL, "model.layers.1.self_attn.qkv_proj.output"],
    "olmo2": [*CANONICAL, *MLP, *HEADS, "model.layers.1.post_feedforward_layernorm.output"],
    # Falcon adds the attention's output into its MLP's, in place.
    "falcon_parallel": [*CANONICAL, *MLP, *HEADS, "layers.*.input_layernorm.output"],
    "falcon_two_norms": ALL,
    "falcon_sequential": ALL,
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_point_equals_hooks_in_a_lone_forward_over_prompt_and_generated(
    name, tiny, demo, prompt, capturing, lone_values, assert_rows_close
):
    model = demo if name == "demo" else tiny(name)
    requests = [capturing(model, str(n), prompt(n), 9, points=LAYERS[name]) for n in (1, 13, 6)]
    plain = [Request(f"plain{n}", prompt(n, 1), 12) for n in (3, 20)]
    done = Engine(model, max_running=4).generate([requests[0], plain[0], *requests[1:], plain[1]])
    for request, finished in zip(requests, (done[0], *done[2:4]), strict=True):
        sequence = [*request.prompt, *finished.tokens]
        want = lone_values(model, sequence, request.points)
        assert finished.captured.positions == range(len(sequence))
        assert finished.captured.values.keys() == want.keys()
        for point, value in finished.captured.values.items():
            assert_rows_close(value, want[point], point)


TOKENS = {
    "all": lambda prompt, total: range(total),
    "prompt": lambda prompt, total: range(prompt),
    "generated": lambda prompt, total: range(prompt, total),
    "last": lambda prompt, total: range(total - 1, total),
    "last 3": lambda prompt, total: range(total - 3, total),
    "last 12": lambda prompt, total: range(total - 12, total),  # reaches into the prompt
    "last 500": lambda prompt, total: range(total),
}


@pytest.mark.parametrize("which", TOKENS)
def test_the_tokens_asked_for_and_no_others_are_captured(
    which, tiny, prompt, capturing, lone_values, assert_rows_close
):
    model = tiny("qwen3")
    tokens = {"last": int(which.split()[1])} if " " in which else which
    points = ["embed.output", "layers.1.output", "lm_head.output"]
    requests = [capturing(model, str(n), prompt(n), 7, points=points, tokens=tokens) for n in (6, 15)]
    for request, finished in zip(requests, Engine(model).generate(requests), strict=True):
        sequence = [*request.prompt, *finished.tokens]
        rows = TOKENS[which](len(request.prompt), len(sequence))
        assert finished.captured.positions == rows
        for point, want in lone_values(model, sequence, request.points).items():
            assert_rows_close(finished.captured.values[point], want[rows.start : rows.stop], point)


def test_requests_with_unlike_points_and_tokens_share_a_batch(tiny, prompt, capturing, lone_values, assert_rows_close):
    model = tiny("qwen3")
    wanted = [
        {"points": ["layers.2.output"], "tokens": "all"},
        {"points": ["layers.0.output", "lm_head.output"], "tokens": "generated"},
        {"points": ["layers.2.output", "layers.0.mlp.input"], "tokens": {"last": 2}},
        {"points": ["embed.output"], "tokens": "prompt"},
    ]
    requests = [capturing(model, str(i), prompt(5 + i), 4 + 5 * i, **capture) for i, capture in enumerate(wanted)]
    for request, finished in zip(requests, Engine(model, max_running=3).generate(requests), strict=True):
        want = lone_values(model, [*request.prompt, *finished.tokens], request.points)
        rows = finished.captured.positions
        for point, value in finished.captured.values.items():
            assert_rows_close(value, want[point][rows.start : rows.stop], f"{request.id} {point}")


@pytest.mark.parametrize(("features", "index"), [({"first": 3}, [0, 1, 2]), ({"index": [30, 0, 7]}, [30, 0, 7])])
def test_the_features_asked_for_are_kept_in_the_order_asked(features, index, tiny, prompt, capturing, lone_values):
    model = tiny("qwen3")
    request = capturing(model, "a", prompt(8), 4, points=["layers.1.output"], features=features)
    (finished,) = Engine(model).generate([request])
    want = lone_values(model, [*request.prompt, *finished.tokens], request.points)["layers.1.output"]
    torch.testing.assert_close(finished.captured.values["layers.1.output"], want[:, index], rtol=1e-4, atol=1e-5)


def test_features_of_heads_are_those_of_each_head(tiny, prompt, capturing):
    model = tiny("qwen3")
    request = capturing(model, "a", prompt(8), 2, points=["layers.1.attention.heads"], features={"first": 3})
    (finished,) = Engine(model).generate([request])
    assert finished.captured.values["layers.1.attention.heads"].shape == (10, 4, 3)


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


def test_the_models_own_dtype_comes_bit_exact(build, byte_tokenizer, prompt, capturing, lone_values):
    model = Model(build("qwen3").to(torch.bfloat16), byte_tokenizer, "qwen3")
    request = capturing(model, "a", prompt(8), 0, points=["layers.*.output"])
    (finished,) = Engine(model).generate([request])
    for point, want in lone_values(model, request.prompt, request.points).items():
        assert finished.captured.values[point].dtype == torch.bfloat16
        assert torch.equal(finished.captured.values[point], want)


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


def test_logits_captured_are_those_the_next_token_was_drawn_from(tiny, prompt, capturing):
    model = tiny("gemma2")
    (finished,) = Engine(model).generate([capturing(model, "a", prompt(7), 8, points=["lm_head.output"])])
    logits = finished.captured.values["lm_head.output"]
    assert logits[6:-1].argmax(dim=-1).tolist() == list(finished.tokens)


def test_one_position_a_point_reads_its_token_ids(tiny, prompt, capturing):
    model = tiny("qwen3")
    request = capturing(model, "a", prompt(7), 3, points=["embed.input"])
    (finished,) = Engine(model).generate([request])
    assert finished.captured.values["embed.input"].flatten().tolist() == [*request.prompt, *finished.tokens]


def test_rows_given_in_pieces_are_whole_again_and_their_memory_is_free_for_the_next(tiny, prompt, capturing):
    model = tiny("qwen3")
    engine = Engine(model, capture_bytes=16 << 10)  # a request's rows go out by a few
    want = None
    for _ in range(6):
        requests = [capturing(model, str(n), prompt(n), 40, points=["layers.*.output"]) for n in (5, 20)]
        done = engine.generate(requests)
        for request, finished in zip(requests, done, strict=True):
            tokens = [*request.prompt, *finished.tokens]
            assert finished.captured.positions == range(len(tokens))
            assert list(finished.captured.token_ids) == tokens
        want = want or done
        for first, now in zip(want, done, strict=True):
            for point, value in now.captured.values.items():
                assert torch.equal(value, first.captured.values[point])
