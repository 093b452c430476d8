"""Tokens are drawn from the distribution that transformers' own warpers give."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from deployments.engine.engine import Engine
from deployments.engine.request import Request, Sampling
from deployments.engine.sampling import draw

VOCABULARY = 24
GRID = 4000


def warped(logits, sampling):
    """Probabilities as transformers' generate would draw by them, [vocabulary]."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(dim=-1)[0]


def masses(logits, sampling):
    """How often each token is drawn as the number goes evenly from 0 to 1."""
    numbers = [(i + 0.5) / GRID for i in range(GRID)]
    drawn = draw(logits.expand(GRID, -1), [sampling] * GRID, numbers)
    return torch.bincount(drawn, minlength=logits.shape[-1]) / GRID


def random_logits(seed, scale=2.0):
    return scale * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), list(itertools.product([0.3, 1.0, 1.7], [0.2, 0.7, 1.0], [0, 1, 5, 500]))
)
def test_masses_equal_transformers_warpers(temperature, top_p, top_k):
    sampling = Sampling(temperature, top_p, top_k)
    logits = random_logits(seed=1)
    torch.testing.assert_close(masses(logits, sampling), warped(logits, sampling), rtol=0, atol=2 / GRID)


@pytest.mark.parametrize("sampling", [Sampling(1e-9), Sampling(1.0, top_p=1e-9), Sampling(1.0, top_k=1)])
def test_the_narrowest_settings_take_the_likeliest_token(sampling):
    logits = random_logits(seed=2, scale=50.0)
    assert masses(logits, sampling)[logits.argmax()] == 1.0


def test_a_token_of_no_probability_is_never_drawn():
    logits = random_logits(seed=3).masked_fill(torch.arange(VOCABULARY) % 2 == 0, -torch.inf)
    for number in (0.0, 1 - 1e-16, 0.9999999):
        assert draw(logits[None], [Sampling()], [number]).item() % 2 == 1


rows = st.tuples(
    st.integers(0, 99),
    st.sampled_from([Sampling(0.5), Sampling(), Sampling(1.0, 0.5), Sampling(2.0, 0.9, 4)]),
    st.floats(0, 1, exclude_max=True),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(rows, min_size=1, max_size=6))
def test_a_row_is_drawn_the_same_whatever_its_neighbours(batch):
    logits = torch.stack([random_logits(seed) for seed, _, _ in batch])
    together = draw(logits, [sampling for _, sampling, _ in batch], [number for _, _, number in batch])
    for i, (seed, sampling, number) in enumerate(batch):
        assert together[i] == draw(random_logits(seed)[None], [sampling], [number])[0]


def test_a_seed_gives_the_same_tokens_whatever_shares_the_batch(tiny, prompt):
    model = tiny("qwen3")
    seeded = Request("seeded", prompt(7), 20, Sampling(1.0, top_p=0.9, seed=11))
    (first,) = Engine(model).generate([seeded])
    others = [Request(str(i), prompt(3 + i), 5 + 4 * i, Sampling(1.5)) for i in range(4)]
    others.append(Request("greedy", prompt(4), 12))
    together = Engine(model, max_running=4).generate([*others[:2], seeded, *others[2:]])
    assert list(together[2].tokens) == list(first.tokens)


def test_another_seed_gives_other_tokens_and_no_seed_gives_any(tiny, prompt):
    model = tiny("qwen3")
    seeds = [1, 2, None, None]
    requests = [Request(str(i), prompt(7), 20, Sampling(seed=seed)) for i, seed in enumerate(seeds)]
    texts = {tuple(finished.tokens) for finished in Engine(model).generate(requests)}
    assert len(texts) == 4


def test_greedy_and_sampled_requests_share_a_batch(tiny, prompt, alone, same_greedy):
    model = tiny("qwen3")
    requests = [Request("warm", prompt(5), 10, Sampling(2.0)), Request("cold", prompt(5), 10)]
    _, cold = Engine(model).generate(requests)
    assert same_greedy(model, prompt(5), cold.tokens, alone(model, prompt(5), 10))


def test_tokens_of_a_request_follow_the_models_distribution(tiny, prompt):
    model = tiny("qwen3")
    sampling = Sampling(0.7, top_k=4)
    with torch.inference_mode():
        logits = model.hf(input_ids=torch.tensor([prompt(5)]), use_cache=False).logits[0, -1]
    requests = [Request(str(seed), prompt(5), 1, Sampling(0.7, top_k=4, seed=seed)) for seed in range(600)]
    drawn = torch.tensor([finished.tokens[0] for finished in Engine(model).generate(requests)])
    shares = torch.bincount(drawn, minlength=256) / len(requests)
    # Four standard deviations of a share of 600 draws; the seeds are fixed, so it passes always or never.
    torch.testing.assert_close(shares, warped(logits, sampling), rtol=0, atol=4 * 0.5 / 600**0.5)
