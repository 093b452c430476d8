"""A layer's lens equals the output of a plain forward in which the last layer returns that layer's output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from deployments.engine import sequence
from deployments.engine.decoding import lens_reader
from deployments.engine.edits import Edit, Tokens
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Delta, LensLayers, Request, Sampling
from deployments.errors import RequestError
from deployments.model.model import Model
from tests.deployments.conftest import DEVICE, SERVED

NEW = 6
CLOSE = 2e-4
# Those whose ends differ: in their norm, their head, or what is between; test_parity has the last layer's of all.
DIFFERENT = ("qwen3", "gpt2", "gemma2", "opt", "opt_norms_behind", "granite", "falcon_parallel", "llama4")
ARCHITECTURES = [name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.long) for name in SERVED]


def lens_of(model, layers=None, top_k=5):
    layers = tuple(range(model.points.layer_count)) if layers is None else layers
    return LensLayers(layers, tuple(output(model, layer) for layer in layers), top_k)


def output(model, layer):
    (point,) = model.points.named(f"layers.{layer}.output", "")
    return point


def asking(model, id, prompt, new=NEW, **fields):
    return Request(id, prompt, new, **{"lens": lens_of(model), "ignore_eos": True} | fields)


def said(events, id):
    """(tokens, logprobs, lens) of one request, one for each token."""
    deltas = [event for event in events if isinstance(event, Delta) and event.id == id]
    tokens, logprobs = ([one for delta in deltas for one in getattr(delta, name)] for name in ("tokens", "logprobs"))
    return tokens, logprobs, [[layer.top for layer in layers] for delta in deltas for layers in delta.lens]


@torch.inference_mode()
def by_hand(model, tokens, added=None):
    """[layers, tokens, vocabulary] logprobs of plain forwards; `added` is (layer, vector, from which token on)."""
    layers = model.hf.get_submodule(model.points.layers)

    def forward(hooks):
        handles = [layers[layer].register_forward_hook(hook) for layer, hook in hooks]
        try:
            ids = torch.tensor([tokens], device=model.device)
            return model.hf(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1).cpu()
        finally:
            for handle in handles:
                handle.remove()

    def put(new):
        return lambda _, args, out: (new, *out[1:]) if isinstance(out, tuple) else new

    def change(_, args, out):
        value = (out[0] if isinstance(out, tuple) else out).clone()
        value[0, added[2] :] += added[1]
        return put(value)(_, args, out)

    def keep(_, args, out):
        seen.append((out[0] if isinstance(out, tuple) else out).clone())

    seen = []
    forward([*([(added[0], change)] if added else []), *((i, keep) for i in range(len(layers)))])
    return torch.stack([forward([(-1, put(value))]) for value in seen])


def assert_is(got, want):
    """A token's lens is that of [layers, vocabulary] logprobs."""
    assert len(got) == len(want)
    for layer, (top, row) in enumerate(zip(got, want, strict=True)):
        ids, values = [id for id, _ in top], torch.tensor([value for _, value in top])
        assert len(set(ids)) == len(ids)
        torch.testing.assert_close(values, row[ids], rtol=0, atol=CLOSE, msg=lambda m, i=layer: f"layer {i}: {m}")
        torch.testing.assert_close(values, row.topk(len(ids)).values, rtol=0, atol=CLOSE)


def check(model, events, request, done, added=None):
    tokens, logprobs, lens = said(events, request.id)
    assert tokens == list(done.tokens)
    assert len(lens) == len(tokens) == request.max_tokens
    want = by_hand(model, [*request.prompt, *tokens], added)[:, len(request.prompt) - 1 : -1]  # [layers, tokens, ...]
    for i, (one, logprob) in enumerate(zip(lens, logprobs, strict=True)):
        assert_is(one, want[:, i])
        assert [len(top) for top in one] == [request.lens.top_k] * len(want)
        last, own = [[value for _, value in top] for top in (one[-1], logprob.top[: request.lens.top_k])]
        assert last == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architectures_lens_is_that_of_a_lone_forward_and_ends_in_its_own_logprobs(
    name, tiny, prompt, capturing, drain, endings
):
    model = tiny(name)
    at, numbers = output(model, 1), torch.Generator().manual_seed(0)
    vector = 3 * torch.randn(at.shape, generator=numbers).to(DEVICE)
    # Positions on which the edit begins: in the prompt, and among the answer.
    added = {"edited": (1, vector, 2), "edited later": (1, vector, 11)}
    edits = {id: (Edit(at, "add", tokens=Tokens(first), vector=vector),) for id, (_, _, first) in added.items()}
    requests = [
        asking(model, "short", prompt(2), logprobs=20),
        asking(model, "edited", prompt(9), edits=edits["edited"], logprobs=20),
        asking(model, "edited later", prompt(9, 1), edits=edits["edited later"], logprobs=20),
        asking(model, "in chunks", prompt(30), logprobs=20, sampling=Sampling(1.2, seed=3, repetition_penalty=1.3)),
    ]
    recording = capturing(model, "recording", prompt(5), NEW, points=["layers.*.output", "lm_head.output"])
    requests.append(replace(recording, lens=lens_of(model), ignore_eos=True, logprobs=20))
    engine = Engine(model, prefill_tokens=16)
    for request in requests:
        engine.submit(request)
    engine.submit(Request("plain", prompt(4), NEW))
    events = drain(engine)
    done = endings(events)
    for request in requests:
        check(model, events, request, done[request.id], added.get(request.id))
    assert said(events, "plain")[2] == []
    assert len(done["recording"].captured.positions) == 5 + NEW


SCALED = {
    "granite": ("GraniteConfig", {"logits_scaling": 7.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.125}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.25, "sliding_window": 5}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 1.5}),
}


@pytest.mark.parametrize("name", SCALED)
def test_scales_and_caps_of_logits_are_the_models_own(name, byte_tokenizer, prompt, drain, endings):
    kind, own = SCALED[name]
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15, "pad_token_id": 0}
    config = getattr(transformers, kind)(**sizes, bos_token_id=1, eos_token_id=2, max_position_embeddings=96, **own)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model(AutoModelForCausalLM.from_config(config).eval().to(DEVICE), byte_tokenizer, name)
    assert model.unembedding.refusal is None
    engine, request = Engine(model), asking(model, "a", prompt(9), logprobs=20)
    engine.submit(request)
    events = drain(engine)
    check(model, events, request, endings(events)["a"])


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "opt", "falcon_parallel"])
def test_in_half_precision_the_last_layer_says_what_logprobs_say(name, tiny, prompt, drain):
    model = tiny(name, dtype=torch.bfloat16)
    engine = Engine(model, prefill_tokens=16)
    for i, length in enumerate((3, 9, 30)):
        engine.submit(asking(model, str(i), prompt(length), logprobs=5))
    events = drain(engine)
    for i in range(3):
        _, logprobs, lens = said(events, str(i))
        for one, logprob in zip(lens, logprobs, strict=True):
            last, own = ([value for _, value in top] for top in (one[-1], logprob.top))
            assert last == pytest.approx(own, abs=0.05)  # two products of other shapes round apart


def test_rows_of_one_batch_may_ask_for_other_layers_and_numbers(tiny, prompt, drain, monkeypatch):
    monkeypatch.setattr(lens_reader, "LOGITS_BYTES", 4 * 256 * 2)  # two rows at a time
    model = tiny("qwen3")
    asked = {"first": ((0,), 1), "two": ((0, 2), 20), "last": ((2,), 3), "all": ((0, 1, 2), 7)}
    engine = Engine(model)
    for i, (id, (layers, top_k)) in enumerate(asked.items()):
        engine.submit(asking(model, id, prompt(3 + 2 * i), lens=lens_of(model, layers, top_k)))
    events = drain(engine)
    for i, (id, (layers, top_k)) in enumerate(asked.items()):
        ids = prompt(3 + 2 * i)
        tokens, _, lens = said(events, id)
        want = by_hand(model, [*ids, *tokens])[list(layers), len(ids) - 1 : -1]
        assert len(lens) == NEW
        for turn, one in enumerate(lens):
            assert [len(top) for top in one] == [top_k] * len(layers)
            assert_is(one, want[:, turn])


def test_neighbours_keep_every_bit(tiny, prompt, capturing):
    model = tiny("qwen3")
    plain = [capturing(model, f"plain {i}", prompt(5 + i), NEW, points=["lm_head.output"]) for i in range(3)]
    others = [Request(f"other {i}", prompt(7 + i, 1), NEW, ignore_eos=True) for i in range(3)]
    seen = [replace(other, lens=lens_of(model)) for other in others]
    quiet, beside = (Engine(model).generate([*plain, *those]) for those in (others, seen))
    for a, b in zip(quiet, beside, strict=True):
        assert a.tokens == b.tokens
    for a, b in zip(quiet[:3], beside[:3], strict=True):
        assert torch.equal(a.captured.values["lm_head.output"], b.captured.values["lm_head.output"])


def test_a_request_that_loses_its_slot_has_each_tokens_lens_once(tiny, prompt, drain, endings, monkeypatch):
    monkeypatch.setattr(sequence, "RESERVED_TOKENS", 1)  # so that they come to want more than there is
    model = tiny("qwen3", num_hidden_layers=2, max_position_embeddings=256)
    sizes = [(62, 90), (58, 80)]
    lens = lens_of(model)._replace(prompt=Tokens(0, 58))
    requests = [asking(model, str(i), prompt(n), new, lens=lens, logprobs=20) for i, (n, new) in enumerate(sizes)]
    requests.append(replace(requests[1], id="at once", streamed=False))
    tight = Engine(model, kv_bytes=208 * KvMemory(model, 1, kv_bytes=1).position_bytes)
    for request in requests:
        tight.submit(request)
    events = drain(tight)
    assert tight.statistics.preempted > 0
    done = endings(events)
    for request in requests:
        assert [position for position, _ in done[request.id].prompt_lens] == [*range(58)]
        rest = done[request.id].rest
        check(model, [*events, *([rest] if rest else [])], request, done[request.id])


def test_memory_that_a_lens_does_not_find_costs_a_second_try(tiny, prompt, drain, endings, monkeypatch):
    model = tiny("qwen3")
    drawn = {"logprobs": 20, "sampling": Sampling(1.0, seed=1)}
    requests = [asking(model, str(i), prompt(5, i), **drawn) for i in range(4)]
    want = [tuple(done.tokens) for done in Engine(model).generate(requests)]
    logits, calls = model.unembedding.logits, []

    def failing(rows):
        calls.append(len(rows))
        if len(calls) in (1, 4):  # of a prefill and of a decode
            raise torch.OutOfMemoryError("there is none")
        return logits(rows)

    monkeypatch.setattr(model.unembedding, "logits", failing)
    engine = Engine(model, fixed_memory=False)
    for request in requests:
        engine.submit(request)
    events = drain(engine)
    assert engine.statistics.out_of_memory == 2
    done = endings(events)
    for request, tokens in zip(requests, want, strict=True):
        assert done[request.id].tokens == list(tokens)
        check(model, events, request, done[request.id])


def test_a_layer_whose_values_are_not_finite_has_no_tokens(tiny, prompt, drain):
    model = tiny("qwen3")
    size = output(model, 0).shape
    broken = Edit(output(model, 0), "replace", vector=torch.full(size, torch.inf, device=DEVICE))
    sound = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mended = Edit(output(model, 1), "replace", vector=sound)
    engine = Engine(model)
    engine.submit(asking(model, "a", prompt(5), edits=(broken, mended)))
    engine.submit(asking(model, "beside", prompt(5)))
    events = drain(engine)
    assert [[len(top) for top in one] for one in said(events, "a")[2]] == [[0, 5, 5]] * NEW
    assert [[len(top) for top in one] for one in said(events, "beside")[2]] == [[5, 5, 5]] * NEW


def test_a_layer_that_a_forward_leaves_out_has_no_tokens(build, byte_tokenizer, prompt, drain):
    model = Model(build("qwen3"), byte_tokenizer, "qwen3")
    layers = model.hf.model.layers
    engine = Engine(model)
    engine.submit(asking(model, "a", prompt(5)))
    events = engine.step()
    model.hf.model.layers = torch.nn.ModuleList([layers[0], layers[2]])
    events += drain(engine)
    assert [[len(top) for top in one] for one in said(events, "a")[2]] == [[5, 5, 5], *[[5, 0, 5]] * (NEW - 1)]


def test_a_model_that_is_more_than_its_layers_says_is_refused_a_lens_and_nothing_else(build, byte_tokenizer, prompt):
    hf = build("llama")

    def more(module, args, kwargs, out):
        out.last_hidden_state = out.last_hidden_state + module.embed_tokens(kwargs["input_ids"])
        return out

    hf.model.register_forward_hook(more, with_kwargs=True)
    model = Model(hf, byte_tokenizer, "llama")
    with pytest.raises(RequestError, match="differ from its own") as refused:
        Engine(model).generate([asking(model, "a", prompt(5))])
    assert (refused.value.field, refused.value.code) == ("logit_lens", "logit_lens_unsupported")
    (done,) = Engine(model).generate([Request("b", prompt(5), NEW)])
    assert done.reason != "error"


def test_tokens_of_the_prompt_are_read_as_the_prompt_runs_with_targets_and_their_ranks(tiny, prompt, endings, drain):
    """In chunks, beside others, and without a token that is generated; a target's rank counts those above it."""
    model = tiny("qwen3")
    lens = lens_of(model, top_k=0)._replace(targets=(7, 200), generated=False)
    asked = [
        asking(model, "all", prompt(20), 0, lens=lens._replace(prompt=Tokens(0, 20))),
        asking(model, "few", prompt(20, 1), NEW, lens=lens._replace(prompt=Tokens(3, 18, (3, 17)))),
    ]
    engine = Engine(model, prefill_tokens=8)
    for request in asked:
        engine.submit(request)
    done = endings(drain(engine))
    for request in asked:
        seen = done[request.id].prompt_lens
        assert [position for position, _ in seen] == [*request.lens.prompt.of(20)]
        want = by_hand(model, request.prompt)  # [layers, tokens, vocabulary]
        for position, layers in seen:
            for layer, row in zip(layers, want[:, position], strict=True):
                assert layer.top == ()
                assert [token for token, _, _ in layer.targets] == [*request.lens.targets]
                for token, logprob, rank in layer.targets:
                    assert logprob == pytest.approx(row[token].item(), abs=CLOSE)
                    assert int((row > row[token] + CLOSE).sum()) < rank <= int((row > row[token] - CLOSE).sum()) + 1


@pytest.mark.parametrize("layers", [(0, 1), (0, 2)], ids=["beside the last", "with the last"])
def test_each_layer_ranks_what_the_last_layer_puts_first(tiny, prompt, endings, drain, monkeypatch, layers):
    """At tokens of the prompt and generated ones, beside a request with targets of its own, a few rows at a time."""
    monkeypatch.setattr(lens_reader, "LOGITS_BYTES", 4 * 256 * 5)
    model = tiny("qwen3")
    lens = lens_of(model, layers, top_k=1)._replace(last=output(model, 2), prompt=Tokens(0, 9))
    request = asking(model, "last", prompt(9), lens=lens)
    engine = Engine(model)
    engine.submit(request)
    engine.submit(asking(model, "fixed", prompt(7, 1), lens=lens_of(model)._replace(targets=(7, 200))))
    events = drain(engine)
    done = endings(events)["last"]
    deltas = [event for event in events if isinstance(event, Delta) and event.id == "last"]
    generated = enumerate((one for delta in deltas for one in delta.lens), 8)
    want = by_hand(model, [*prompt(9), *done.tokens])  # [layers, tokens, vocabulary]
    seen = [*done.prompt_lens, *generated]
    assert [position for position, _ in seen] == [*range(9), *range(8, 8 + NEW)]
    for position, found in seen:
        for number, layer in zip(layers, found, strict=True):
            row = want[number, position]
            [(token, logprob, rank)] = layer.targets
            assert want[-1, position, token] == pytest.approx(want[-1, position].max().item(), abs=CLOSE)
            assert logprob == pytest.approx(row[token].item(), abs=CLOSE)
            assert int((row > row[token] + CLOSE).sum()) < rank <= int((row > row[token] - CLOSE).sum()) + 1
