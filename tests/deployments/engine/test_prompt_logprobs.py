"""A prompt's logprobs equal a plain forward's, come once, and cost other requests nothing."""

import pytest
import torch

from deployments.engine.decoding import prompt_logprobs
from deployments.engine.decoding.prompt_logprobs import PromptScores
from deployments.engine.engine import Engine
from deployments.engine.request import Delta, PromptLogprobs, Request
from deployments.model.model import Model


def of(events, id):
    """The one event that says a prompt's logprobs, before any token of the answer."""
    mine = [event for event in events if event.id == id and not isinstance(event, PromptLogprobs)]
    (said,) = [event for event in events if event.id == id and isinstance(event, PromptLogprobs)]
    assert events.index(said) < events.index(mine[0])
    return said.logprobs


@torch.inference_mode()
def forced(model, prompt):
    """[tokens - 1, vocabulary] logprobs of each token behind the first in one plain forward."""
    ids = torch.tensor([list(prompt)], device=model.device)
    return model.hf(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1).cpu()


def assert_plain(model, prompt, got, likeliest):
    want = forced(model, prompt)
    assert len(got) == len(prompt) - 1
    own = want.gather(-1, torch.tensor(prompt[1:])[:, None]).squeeze(-1)
    torch.testing.assert_close(torch.tensor([one.logprob for one in got]), own, rtol=1e-3, atol=1e-3)
    for one, row in zip(got, want, strict=True):
        ids, values = [id for id, _ in one.top], torch.tensor([value for _, value in one.top])
        torch.testing.assert_close(values, row.topk(likeliest).values, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(values, row[ids], rtol=1e-3, atol=1e-3)


@pytest.fixture
def head_rows(build, byte_tokenizer):
    """A model, and how many rows its head has run over in each forward."""
    model = Model(build("qwen3"), byte_tokenizer, "qwen3")
    rows: list[int] = []
    head = model.hf.get_output_embeddings()
    head.register_forward_hook(lambda _, args, output: rows.append(output[..., 0].numel()))
    return model, rows


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_is_scored_without_an_answer_or_with_one_told_at_its_end(max_tokens, tiny, prompt, drain, endings):
    model, ids = tiny("qwen3"), prompt(12)
    engine = Engine(model)
    engine.submit(Request("a", ids, max_tokens, prompt_logprobs=1, logprobs=1, ignore_eos=True, streamed=False))
    events = drain(engine)
    assert_plain(model, ids, of(events, "a"), 1)
    assert len(endings(events)["a"].tokens) == max_tokens
    assert not [event for event in events if isinstance(event, Delta)]


def test_the_head_runs_over_last_tokens_and_the_prompts_that_are_scored_alone(head_rows, prompt, drain):
    model, rows = head_rows
    engine = Engine(model, fixed_memory=False)
    for seed, (id, likeliest) in enumerate((("a", None), ("b", 1), ("c", None))):
        engine.submit(Request(id, prompt(20, seed), 2, prompt_logprobs=likeliest, ignore_eos=True))
    rows.clear()
    drain(engine)
    assert rows == [3 + 19, 3]  # the prompts, and one decode


def test_a_long_prompt_is_scored_within_the_memory_for_logits(head_rows, prompt, drain, monkeypatch):
    model, rows = head_rows
    monkeypatch.setattr(prompt_logprobs, "LOGITS_BYTES", 4 * 256 * 40)
    engine = Engine(model)
    engine.submit(Request("a", prompt(90), 0, prompt_logprobs=1))
    rows.clear()
    events = drain(engine)
    assert rows == [40, 40, 1 + 9]
    assert_plain(model, prompt(90), of(events, "a"), 1)


def test_a_token_that_the_head_does_not_know_is_impossible():
    scores = PromptScores(Request("", [1, 3, 9], 0, prompt_logprobs=1), 4)
    assert scores.wanted(0, 3) == range(2)
    first, second = scores.read(torch.zeros(2, 4))
    assert first.logprob == pytest.approx(-1.3863, abs=1e-4)
    assert second.logprob == float("-inf")
