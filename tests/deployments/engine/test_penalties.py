"""Penalties, bias and min_tokens change logits as transformers' processors and OpenAI's API do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from deployments.engine import sequence
from deployments.engine.decoding.sampling import NO_TOKEN_LEFT, adjust, adjustments, choose
from deployments.engine.decoding.sampling_state import SamplingState
from deployments.engine.decoding.transfers import to_device
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Delta, Request, Sampling
from deployments.errors import RequestError
from tests.deployments.conftest import DEVICE

VOCABULARY = 16
EOS = frozenset([2])

tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)
asked = st.builds(
    Request,
    id=st.just(""),
    prompt=tokens.filter(len),
    max_tokens=st.just(100),
    sampling=st.builds(
        Sampling,
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
        presence_penalty=st.sampled_from([0.0, -1.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, -0.5, 1.5]),
        logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=4),
        min_tokens=st.integers(0, 8),
    ),
    stop_token_ids=st.sampled_from([(), (5,), (5, 9)]),
    ignore_eos=st.booleans(),
)


def processed(logits, request, answer):
    """What transformers' processors make of a row's logits, with OpenAI's two penalties among them, [1, vocabulary]."""
    sampling = request.sampling
    ids = torch.tensor([[*request.prompt, *answer]])
    scores = logits[None].clone()
    if sampling.logit_bias:
        scores = SequenceBiasLogitsProcessor({(id,): bias for id, bias in sampling.logit_bias.items()})(ids, scores)
    if sampling.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    for token in set(answer):
        scores[0, token] -= sampling.frequency_penalty * answer.count(token) + sampling.presence_penalty
    ends = [*request.stop_token_ids, *([] if request.ignore_eos else EOS)]
    if sampling.min_tokens and ends:
        scores = MinNewTokensLengthLogitsProcessor(len(request.prompt), sampling.min_tokens, ends)(ids, scores)
    return scores


def having_said(request, answer, vocabulary=VOCABULARY):
    sampler = SamplingState(request, EOS, vocabulary)
    for token in answer:
        sampler.add(token)
    return sampler


@given(st.lists(st.tuples(asked, tokens), min_size=1, max_size=5), st.integers(0, 99))
def test_every_row_of_a_batch_is_adjusted_as_transformers_adjusts_it_alone(batch, seed):
    logits = 3 * torch.randn(len(batch), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    scores = logits.to(DEVICE, copy=True)
    states = [having_said(request, answer) for request, answer in batch]
    adjust(scores, to_device(adjustments(states, 0, VOCABULARY), scores.device))
    for got, row, (request, answer) in zip(scores.cpu(), logits, batch, strict=True):
        torch.testing.assert_close(got[None], processed(row, request, answer), rtol=1e-5, atol=1e-5)


def test_a_prompt_id_that_the_head_cannot_give_is_not_penalized():
    request = Request("", [3, 20], 10, Sampling(0.0, repetition_penalty=2.0, logit_bias={21: 5.0}))
    assert choose(torch.ones(1, VOCABULARY, device=DEVICE), [having_said(request, [])]).failed == {}


def test_greedy_tokens_with_penalty_bias_and_min_tokens_equal_generate(tiny, prompt, ending_prompt, alone):
    model = tiny("qwen3")
    prompts = [ending_prompt, *(prompt(length) for length in (3, 9, 20))]
    bias = {17: 3.0, 40: -5.0, 2: 1.5}
    sequence_bias = [[[id], value] for id, value in bias.items()]
    wants = [
        alone(model, ids, 30, repetition_penalty=1.3, min_new_tokens=12, sequence_bias=sequence_bias) for ids in prompts
    ]
    asked = Sampling(0.0, repetition_penalty=1.3, logit_bias=bias, min_tokens=12)
    done = Engine(model).generate([Request(str(i), ids, 30, asked) for i, ids in enumerate(prompts)])
    assert [list(finished.tokens) for finished in done] == wants


def test_a_penalty_on_what_was_said_keeps_a_greedy_text_from_repeating_itself(tiny, prompt):
    settings = Sampling(0.0, presence_penalty=1000.0)
    (said,) = Engine(tiny("qwen3")).generate([Request("a", prompt(5), 60, settings, ignore_eos=True)])
    assert len(set(said.tokens)) == 60


def test_settings_that_leave_no_token_end_their_row_alone():
    everything = tuple(range(VOCABULARY))
    barred = having_said(Request("", [1], 9, Sampling(0.0, min_tokens=1), stop_token_ids=everything), [])
    drawing = having_said(Request("", [1], 9, Sampling(1.0, min_tokens=1), stop_token_ids=everything), [])
    plain = having_said(Request("", [1], 9), [])
    logits = torch.arange(3 * VOCABULARY, dtype=torch.float32, device=DEVICE).view(3, VOCABULARY)
    chosen = choose(logits, [barred, plain, drawing])
    assert chosen.failed == {0: NO_TOKEN_LEFT, 2: NO_TOKEN_LEFT}
    assert chosen.tokens[1] == VOCABULARY - 1


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request("a", [3], 4, Sampling(logit_bias={256: 1.0})), "logit_bias"),
        (Request("a", [3], 4, Sampling(logit_bias={-1: 1.0})), "logit_bias"),
        (Request("a", [3], 4, stop_token_ids=(5, 300)), "stop_token_ids"),
        (Request("a", [3], 4, Sampling(min_tokens=5)), "min_tokens"),
        (Request("a", [3], 4, logprobs=21), "logprobs"),
        (Request("a", [3], 4, logprobs=-1), "logprobs"),
        (Request("a", [3], 0, prompt_logprobs=21), "prompt_logprobs"),
    ],
)
def test_settings_that_the_model_cannot_meet_are_refused_by_their_field(request_, field, tiny):
    with pytest.raises(RequestError) as refused:
        Engine(tiny("qwen3")).check(request_)
    assert refused.value.field == field


def test_a_request_that_loses_its_pages_goes_on_as_if_it_had_not(tiny, prompt, drain, endings, monkeypatch):
    monkeypatch.setattr(sequence, "RESERVED_TOKENS", 1)  # so that they come to want more than there is
    model = tiny("qwen3", num_hidden_layers=2, max_position_embeddings=256)
    position = KvMemory(model, 1, kv_bytes=1).position_bytes
    sampling = [
        Sampling(1.0, seed=3, repetition_penalty=1.2, min_p=0.02),
        Sampling(0.8, 0.9, seed=4, presence_penalty=0.5, frequency_penalty=0.3, min_tokens=80),
        Sampling(0.0, repetition_penalty=1.1, logit_bias={9: 1.0}),
    ]
    requests = [
        Request(str(i), prompt(length), 90, settings, ignore_eos=i != 1, logprobs=2)
        for i, (length, settings) in enumerate(zip((62, 58, 30), sampling, strict=True))
    ]
    tight, roomy = Engine(model, kv_bytes=240 * position), Engine(model)
    for request in requests:
        tight.submit(request)
        roomy.submit(request)
    events, undisturbed = drain(tight), drain(roomy)
    assert tight.statistics.preempted > 0
    assert roomy.statistics.preempted == 0
    for request in requests:
        got, want = endings(events)[request.id], endings(undisturbed)[request.id]
        assert list(got.tokens) == list(want.tokens)
        said, meant = (
            [one for event in seen if isinstance(event, Delta) and event.id == request.id for one in event.logprobs]
            for seen in (events, undisturbed)
        )
        assert len(said) == len(got.tokens)
        assert [one.logprob for one in said] == pytest.approx([one.logprob for one in meant], abs=1e-3)
