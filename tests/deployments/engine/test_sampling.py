"""Tokens are drawn from the same distribution as with transformers' warpers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from deployments.engine.decoding.sampling import NOT_FINITE, choose, draw, draw_arrays, launch, weigh
from deployments.engine.decoding.sampling_state import SamplingState
from deployments.engine.decoding.transfers import to_device
from deployments.engine.engine import Engine
from deployments.engine.request import GREEDY, Request, Sampling
from tests.deployments.conftest import DEVICE

VOCABULARY = 24


def warped(logits, sampling):
    """Probabilities as transformers' generate would draw by them, [vocabulary]."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None].cpu())
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores.softmax(dim=-1)[0]


def weighed(logits, samplings):
    """The weights [rows, vocabulary], each row sorted in full at once."""
    states = [SamplingState(Request("", [1], 9, one), frozenset(), logits.shape[-1]) for one in samplings]
    weights = logits.clone()
    weigh(weights, *to_device(draw_arrays(states), logits.device), width=logits.shape[-1])
    return weights


def random_logits(seed, scale=2.0, vocabulary=VOCABULARY):
    return scale * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def sampler(sampling, prompt=(1,), **fields):
    return SamplingState(Request("", prompt, 100, sampling, **fields), frozenset(), VOCABULARY)


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.05, 2),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    top_k=st.one_of(st.integers(0, 40), st.just(500)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
)


@given(st.lists(st.tuples(st.integers(0, 99), samplings), min_size=1, max_size=6))
def test_any_settings_in_one_batch_give_each_row_transformers_probabilities(batch):
    logits = torch.stack([random_logits(seed, scale=3.0) for seed, _ in batch])
    weights = weighed(logits, [sampling for _, sampling in batch]).cpu()
    for row, got, (_, sampling) in zip(logits, weights, batch, strict=True):
        torch.testing.assert_close(got / got.sum(), warped(row, sampling), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(top_k=2000), Sampling(top_p=0.97), Sampling(1.5, 0.9, 2500, min_p=1e-3)])
def test_a_nucleus_wider_than_the_first_look_is_found_whole(sampling):
    rows = [random_logits(seed, scale, vocabulary=3000) for seed, scale in enumerate([0.1, 8.0, 0.5])]
    weights = weighed(torch.stack(rows), [sampling] * 3).cpu()
    for row, got in zip(rows, weights, strict=True):
        torch.testing.assert_close(got / got.sum(), warped(row, sampling), rtol=1e-4, atol=1e-7)


def test_equals_of_the_last_token_kept_are_kept_with_it():
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 0.0], device=DEVICE)
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.6)):
        assert weighed(logits[None], [sampling])[0].nonzero().flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.0), Sampling(1e-9), Sampling(top_p=0.0), Sampling(top_p=1e-9), Sampling(top_k=1), Sampling(min_p=1.0)],
)
def test_the_narrowest_settings_take_the_likeliest_token(sampling):
    logits = random_logits(seed=2, scale=50.0).expand(50, -1)
    chosen = choose(logits, [sampler(sampling) for _ in range(50)])
    assert set(chosen.tokens) == {int(logits[0].argmax())}


def test_of_two_likeliest_greedy_settings_take_the_same():
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0]], device=DEVICE).expand(20, -1)
    for sampling in (Sampling(top_k=1), Sampling(top_p=0.0), Sampling(min_p=1.0)):
        assert choose(logits, [sampler(sampling) for _ in range(20)]).tokens == [1] * 20


@pytest.mark.parametrize("number", [0.0, 0.5, 0.9999999, 1 - 1e-16])
def test_a_token_of_no_probability_is_never_drawn(number):
    logits = random_logits(seed=3)
    logits[::2] = logits[-1] = -torch.inf
    weights = weighed(logits[None], [Sampling()])
    assert weights[0, draw(weights, torch.tensor([[number]], device=DEVICE), logits.argmax()[None])] > 0


rows = st.tuples(
    st.integers(0, 99),
    st.sampled_from(
        [
            Sampling(0.5, seed=1),
            Sampling(seed=2),
            Sampling(1.0, 0.5, seed=3),
            Sampling(2.0, 0.9, 4, seed=4),
            Sampling(1.0, min_p=0.3, repetition_penalty=1.4, seed=5),
            Sampling(1.0, presence_penalty=1.0, frequency_penalty=-0.5, seed=6),
            Sampling(1.0, logit_bias={3: 4.0, 7: -100.0}, seed=7),
            Sampling(0.0, repetition_penalty=1.5),
            GREEDY,
        ]
    ),
)


@given(
    st.lists(rows, min_size=1, max_size=6), st.lists(st.sampled_from([torch.nan, torch.inf, -torch.inf]), max_size=2)
)
def test_rows_get_the_same_whatever_their_neighbours_even_where_these_are_not_finite(batch, broken):
    def make(sampling):
        made = sampler(sampling, prompt=[1, 2, 3], logprobs=4)
        for token in (4, 5, 4):
            made.add(token)
        return made

    not_finite = [torch.full((VOCABULARY,), value, device=DEVICE) for value in broken]
    logits = torch.stack([*not_finite, *(random_logits(seed) for seed, _ in batch)])
    samplers = [make(Sampling(seed=0)) for _ in broken] + [make(sampling) for _, sampling in batch]
    together = choose(logits, samplers)
    assert together.failed == dict.fromkeys(range(len(broken)), NOT_FINITE)
    for i, (seed, sampling) in enumerate(batch, len(broken)):
        alone = choose(random_logits(seed)[None], [make(sampling)])
        assert together.tokens[i] == alone.tokens[0]
        assert together.logprobs[i] == alone.logprobs[0]


def test_a_token_launched_ahead_is_the_one_chosen_in_turn():
    settings = [
        Sampling(seed=1),
        Sampling(0.0, min_tokens=1),
        Sampling(1.0, 0.8, 5, seed=2, logit_bias={3: 2.0}),
        GREEDY,
    ]
    logits = torch.stack([random_logits(row) for row in range(4)])
    logits[:, 7] += 20  # 7 ends the text
    in_turn, ahead = ([sampler(one, stop_token_ids=(7,), logprobs=2) for one in settings] for _ in range(2))
    choices = [launch(logits, ahead), launch(logits, ahead, ahead=1)]
    for turn, choice in enumerate(choices):
        want = choose(logits, in_turn)
        assert choice.tokens.tolist() == want.tokens
        assert choice.read() == want
        assert (want.tokens[1] == 7) == (turn > 0)
        for state, token in zip(in_turn, want.tokens, strict=True):
            state.add(token)


def test_a_row_wider_than_the_first_look_is_drawn_again():
    logits = torch.stack([random_logits(1, 0.1, vocabulary=3000), random_logits(2, 8.0, vocabulary=3000)])
    request = Request("", [1], 100, Sampling(top_p=0.5, seed=1), logprobs=1)
    states = [SamplingState(request, frozenset(), 3000) for _ in range(2)]
    first, in_full = launch(logits, states), launch(logits, states, width=3000)
    read = first.read()
    assert (first.tokens != in_full.tokens).nonzero().flatten().tolist() == [0]
    assert read == in_full.read()
    for row, token in enumerate(read.tokens):
        assert warped(logits[row], request.sampling)[token] > 0
        assert read.logprobs[row].logprob == pytest.approx(logits[row].log_softmax(-1)[token].item())


def test_half_precision_logits_are_drawn_by_in_single():
    logits = random_logits(seed=4).bfloat16()
    made = [sampler(Sampling(top_p=0.8, seed=seed), logprobs=0) for seed in range(50)]
    chosen = choose(logits.expand(50, -1), made)
    allowed = warped(logits.float(), Sampling(top_p=0.8)).nonzero().flatten().tolist()
    assert set(chosen.tokens) <= set(allowed)
    want = logits.float().log_softmax(-1)
    assert all(chosen.logprobs[i].logprob == pytest.approx(want[token].item()) for i, token in enumerate(chosen.tokens))


def test_a_seed_gives_the_same_tokens_whatever_shares_the_batch(tiny, prompt):
    model = tiny("qwen3")
    seeded = Request("seeded", prompt(7), 20, Sampling(1.0, top_p=0.9, seed=11, repetition_penalty=1.1, min_p=0.01))
    (first,) = Engine(model).generate([seeded])
    others = [Request(str(i), prompt(3 + i), 5 + 4 * i, Sampling(1.5, presence_penalty=i / 2)) for i in range(4)]
    others.append(Request("greedy", prompt(4), 12))
    together = Engine(model, max_running=4).generate([*others[:2], seeded, *others[2:]])
    assert list(together[2].tokens) == list(first.tokens)


def test_another_seed_gives_other_tokens_and_no_seed_gives_any(tiny, prompt):
    model = tiny("qwen3")
    seeds = [1, 2, None, None]
    requests = [Request(str(i), prompt(7), 20, Sampling(seed=seed)) for i, seed in enumerate(seeds)]
    texts = {tuple(finished.tokens) for finished in Engine(model).generate(requests)}
    assert len(texts) == 4


def test_tokens_of_a_request_follow_the_models_distribution(tiny, prompt):
    model = tiny("qwen3")
    with torch.inference_mode():
        logits = model.hf(input_ids=torch.tensor([prompt(5)], device=model.device), use_cache=False).logits[0, -1]
    requests = [Request(str(seed), prompt(5), 1, Sampling(0.7, top_k=4, seed=seed)) for seed in range(600)]
    drawn = torch.tensor([finished.tokens[0] for finished in Engine(model).generate(requests)])
    want = 600 * warped(logits, Sampling(0.7, top_k=4))
    counts = torch.bincount(drawn, minlength=256)
    assert counts[want == 0].sum() == 0
    statistic = ((counts - want) ** 2 / want)[want > 0].sum()
    # Chi-square of 3 degrees of freedom is above this once in 1000 times; the seeds are fixed.
    assert statistic < 16.27
