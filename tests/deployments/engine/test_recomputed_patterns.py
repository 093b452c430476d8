"""Under sdpa, one request's attention patterns equal eager attention's, and other requests keep every bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.errors import RequestError
from deployments.model.attention import reference
from deployments.model.model import Model
from deployments.places import attention_patterns
from deployments.places.attention_patterns import sdpa_with_patterns, showing
from deployments.places.points import Points
from deployments.points.capture import Capture

EVERY = ["layers.*.attention.weights"]
WEIGHTS = [f"layers.{i}.attention.weights" for i in range(3)]


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mistral", "gemma3"])
def test_neighbours_keep_every_bit(name, tiny, prompt, capturing):
    model = tiny(name)
    others = ["layers.*.output", "layers.*.attention.heads", "lm_head.output"]

    def neighbour(points):
        requests = [
            capturing(model, "a", prompt(40), 20, points=points),
            capturing(model, "b", prompt(11), 20, points=others),
            capturing(model, "c", prompt(13), 20, points=others),
        ]
        return Engine(model, prefill_tokens=32, fixed_memory=False).generate(requests)

    without, beside = neighbour(["layers.1.output"]), neighbour([*EVERY, "layers.1.output"])
    for one, other in zip(without, beside, strict=True):
        assert one.tokens == other.tokens
        for point, values in one.captured.values.items():
            assert torch.equal(values, other.captured.values[point])


def test_of_rows_and_layers_that_nobody_records_nothing_is_computed(tiny, prompt, capturing, monkeypatch):
    model, rows = tiny("qwen3"), []
    compute = attention_patterns.patterns_of
    monkeypatch.setattr(reference, "patterns_of", lambda query, *rest: rows.append(len(query)) or compute(query, *rest))
    requests = [Request(str(i), prompt(9, i), 6) for i in range(3)]
    Engine(model).generate([*requests, capturing(model, "a", prompt(9), 6, points=WEIGHTS[1:2], tokens="generated")])
    assert rows == [1] * 6  # a decode for each token
    rows.clear()
    Engine(model).generate(requests)
    assert not rows


@given(
    shape=st.tuples(*(st.integers(1, most) for most in (4, 3, 2, 7))),
    extra=st.integers(0, 5),
    mask=st.sampled_from(["none", "boolean", "added", "boolean of all rows"]),
    scaling=st.sampled_from([None, 0.2]),
    chunk=st.sampled_from([1, 40, 1 << 22]),
    data=st.data(),
)
def test_patterns_times_values_are_the_output_which_stays_as_it_was(shape, extra, mask, scaling, chunk, data):
    batch, key_heads, groups, tokens = shape
    rows = data.draw(st.lists(st.integers(0, batch - 1), unique=True).map(sorted))
    keys = tokens if mask == "none" else tokens + extra
    numbers = torch.Generator().manual_seed(0)
    query = torch.randn(batch, key_heads * groups, tokens, 8, generator=numbers)
    key, value = torch.randn(2, batch, key_heads, keys, 8, generator=numbers)
    reads = (torch.rand(1 if "all rows" in mask else batch, 1, tokens, keys, generator=numbers) < 0.5).index_fill(
        3, torch.tensor([0]), True
    )
    masks = {"none": None, "added": torch.zeros(reads.shape).masked_fill(~reads, torch.finfo(torch.float32).min)}
    module = torch.nn.Module()
    module.num_key_value_groups = groups
    arguments = module, query, key, value, masks.get(mask, reads)
    want, _ = sdpa_attention_forward(*arguments, scaling=scaling)
    with pytest.MonkeyPatch.context() as patch, showing({module: rows}):
        patch.setattr(attention_patterns, "CHUNK", chunk)
        output, patterns = sdpa_with_patterns(*arguments, scaling=scaling)
    assert torch.equal(output, want)
    assert sdpa_with_patterns(*arguments, scaling=scaling)[1] is None  # once nobody is shown them
    assert patterns.shape == (len(rows), key_heads * groups, tokens, keys)
    by_hand = patterns @ value[rows].repeat_interleave(groups, 1)  # [rows, heads, tokens, value_dim]
    torch.testing.assert_close(by_hand.transpose(1, 2), want[rows])


def test_where_eager_attention_does_more_patterns_are_refused_with_what_to_do(build, monkeypatch):
    eager = modeling_llama.eager_attention_forward

    def leaning(module, query, key, value, attention_mask, **options):
        leant = attention_mask + torch.arange(key.shape[2], device=key.device)
        return eager(module, query, key, value, leant, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", leaning)
    points = Points.learn(build("llama"))
    assert not any(point.place.grows for point in points)
    with pytest.raises(RequestError) as refused:
        points.resolve(Capture(points=WEIGHTS[:1]))
    assert "attention=eager" in refused.value.message


def test_a_forward_that_fails_leaves_nothing_behind(build, byte_tokenizer, prompt, capturing):
    model = Model(build("llama"), byte_tokenizer, "llama")
    request = capturing(model, "a", prompt(5), 3, points=EVERY)

    def fail(*_):
        raise RuntimeError("broken")

    engine = Engine(model)
    hook = model.hf.model.layers[2].mlp.register_forward_hook(fail)
    (finished,) = engine.generate([request])
    hook.remove()
    assert "broken" in finished.error
    assert not any(hasattr(module, attention_patterns.ROWS) for module in model.hf.modules())
    assert engine.generate([request])[0].captured.positions == range(8)
