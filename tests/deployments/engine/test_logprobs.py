"""Logprobs are of the model's own distribution, once per token."""

import pytest
import torch

from deployments.engine.decoding.sampling import choose
from deployments.engine.decoding.sampling_state import SamplingState
from deployments.engine.engine import Engine
from deployments.engine.request import Delta, Request, Sampling
from deployments.model.model import Model
from tests.deployments.conftest import DEVICE

SETTINGS = {
    "greedy": Sampling(0.0),
    "drawn": Sampling(1.3, 0.9, 12, seed=5),
    "penalized": Sampling(0.7, seed=6, repetition_penalty=1.5, presence_penalty=1.0, logit_bias={40: 3.0}),
    "biased": Sampling(0.0, logit_bias={77: 100.0}, min_tokens=5),
}


def of(events, id):
    return [one for event in events if isinstance(event, Delta) and event.id == id for one in event.logprobs]


@torch.inference_mode()
def forced(model, prompt, tokens):
    """[tokens, vocabulary] logprobs of each next token in one plain forward."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    return model.hf(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_logprobs_equal_a_plain_forward_whatever_the_settings(name, tiny, prompt, drain, endings):
    model = tiny(name)
    engine = Engine(model)
    for i, (id, sampling) in enumerate(SETTINGS.items()):
        engine.submit(Request(id, prompt(4 + 7 * i), 20, sampling, ignore_eos=True, logprobs=5 * i))
    engine.submit(Request("none", prompt(6), 20, ignore_eos=True))
    events = drain(engine)
    done = endings(events)
    assert of(events, "none") == []
    for i, id in enumerate(SETTINGS):
        finished, got = done[id], of(events, id)
        want = forced(model, finished.prompt, finished.tokens)
        assert len(got) == 20
        own = want.gather(-1, torch.tensor(finished.tokens)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor([one.logprob for one in got]), own, rtol=1e-3, atol=1e-3)
        for one, row in zip(got, want, strict=True):
            assert len(one.top) == 5 * i
            ids, values = [id for id, _ in one.top], [value for _, value in one.top]
            assert values == sorted(values, reverse=True)
            torch.testing.assert_close(torch.tensor(values), row.topk(5 * i).values, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(row[ids], torch.tensor(values), rtol=1e-3, atol=1e-3)


def test_equally_likely_tokens_come_in_the_order_of_their_ids():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 0.0]], device=DEVICE)
    for count in range(9):
        (one,) = choose(logits, [SamplingState(Request("", [1], 9, logprobs=count), frozenset(), 8)]).logprobs.values()
        assert [id for id, _ in one.top] == [1, 3, 5, 2, 4, 6, 0, 7][:count]


def test_offsets_say_where_each_token_begins_in_the_text(demo, drain, endings):
    ids = demo.tokenizer("Tom has 3 apples. ünï 北京 Tom")["input_ids"]
    engine = Engine(demo)
    engine.submit(Request("a", ids, 40, Sampling(1.5, seed=3), ignore_eos=True, logprobs=0, stop=("zzzz",)))
    events = drain(engine)
    text = "".join(event.text for event in events if isinstance(event, Delta))
    tokens = endings(events)["a"].tokens
    for i, one in enumerate(of(events, "a")):
        whole = demo.tokenizer.decode(tokens[:i], skip_special_tokens=True).rstrip("\ufffd")
        assert one.offset == len(whole)
        assert text.startswith(whole)


def test_more_likeliest_tokens_than_the_vocabulary_has_are_all_of_it(build, byte_tokenizer, drain):
    model = Model(build("qwen3", vocab_size=7), byte_tokenizer, "qwen3")
    engine = Engine(model)
    engine.submit(Request("a", [3, 4], 3, ignore_eos=True, logprobs=20))
    assert [len(one.top) for one in of(drain(engine), "a")] == [7, 7, 7]
