"""Logprobs in OpenAI's formats, once per token, streamed or whole."""

from __future__ import annotations

import json

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from deployments.demo_model import PROBLEMS, WEIGHTS

MODEL = "vitrine-demo"
QUESTION = json.loads(PROBLEMS.read_text().splitlines()[0])["question"]
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def forced(tokenizer):
    """[tokens, vocabulary] logprobs of each token of an answer in one plain forward."""
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)

    @torch.inference_mode()
    def run(prompt, tokens):
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
        return logits[0, len(prompt) - 1 : -1].log_softmax(-1)

    return run


def ask(client, **fields):
    fields = {"temperature": 0, "max_tokens": 40, "logprobs": True, "top_logprobs": 3} | fields
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)


def streamed(chunks):
    """(text, logprobs) of a stream."""
    mine = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in mine)
    return text, [one for choice in mine if choice.logprobs for one in choice.logprobs.content]


def test_a_chats_logprobs_are_the_models_own_of_every_token(client, tokenizer, forced):
    answer = ask(client, temperature=1.2, seed=4, presence_penalty=0.5, max_tokens=60)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert b"".join(bytes(one.bytes or ()) for one in content).decode() == answer.choices[0].message.content
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    tokens = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(one.token)) for one in content]
    want = forced(prompt, [ids[0] for ids in tokens])
    for one, row, ids in zip(content, want, tokens, strict=True):
        assert len(ids) == 1
        assert one.logprob == pytest.approx(row[ids[0]].item(), abs=1e-3)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


def test_logprobs_of_characters_held_back_come_with_their_text(client, tokenizer):
    (byte,) = [id for id in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(id) == "å"]  # 0xE5, a first byte
    fields = {"logit_bias": {str(byte): 100}, "max_tokens": 5, "top_logprobs": 0}
    chunks = list(ask(client, stream=True, **fields))
    text, content = streamed(chunks)
    assert [one.bytes for one in content] == [[0xE5]] * 5
    assert [one.token for one in content] == ["\\xe5"] * 5
    assert text == ask(client, **fields).choices[0].message.content
    assert all(choice.delta.content for chunk in chunks for choice in chunk.choices if choice.logprobs)


def test_a_completions_logprobs_say_where_each_token_stands(client, tokenizer, forced):
    fields = {"model": MODEL, "prompt": "Tom has 3 boxes.", "temperature": 0, "max_tokens": 24, "logprobs": 2}
    choice = client.completions.create(**fields).choices[0]
    found = choice.logprobs
    said = [i for i, token in enumerate(found.tokens) if token != tokenizer.eos_token]
    for i in said:
        begin = found.text_offset[i]
        assert choice.text[begin : begin + len(found.tokens[i])] == found.tokens[i]
    assert "".join(found.tokens[i] for i in said) == choice.text
    tokens = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(token))[0] for token in found.tokens]
    want = forced(tokenizer("Tom has 3 boxes.")["input_ids"], tokens)
    assert found.token_logprobs == pytest.approx(
        [row[id].item() for row, id in zip(want, tokens, strict=True)], abs=1e-3
    )
    assert [max(top.values()) for top in found.top_logprobs] == pytest.approx(want.amax(-1).tolist(), abs=1e-3)
    parts = [c.choices[0].logprobs for c in client.completions.create(**fields, stream=True) if c.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == found.tokens
    assert [offset for part in parts for offset in part.text_offset] == found.text_offset
    assert [value for part in parts for value in part.token_logprobs] == pytest.approx(found.token_logprobs, abs=1e-4)


def test_a_completions_own_token_is_among_its_likeliest(client):
    fields = {"model": MODEL, "prompt": "Tom", "max_tokens": 8, "temperature": 2.0, "seed": 3}
    for count in (0, 1):
        found = client.completions.create(**fields, logprobs=count).choices[0].logprobs
        for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert top[token] == logprob
            assert count <= len(top) <= count + 1


@pytest.mark.parametrize(
    "fields",
    [{"n": 128, "max_tokens": 4000}, {"n": 4, "max_tokens": 4000, "top_logprobs": 20}, {"stream": True, "n": 64}],
)
def test_more_logprobs_than_an_answer_may_hold_are_refused(client, fields):
    with pytest.raises(openai.BadRequestError, match="the limit is 200000") as refused:
        ask(client, **{"max_tokens": 1000, "top_logprobs": 5} | fields)
    assert refused.value.code == "logprobs_too_large"
