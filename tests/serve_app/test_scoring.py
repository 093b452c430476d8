"""Echoed and scored prompts, as evaluation harnesses request them, and the best of several sequences."""

from __future__ import annotations

import json

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from deployments.demo_model import PROBLEMS, WEIGHTS

MODEL = "vitrine-demo"
QUESTION = json.loads(PROBLEMS.read_text().splitlines()[0])["question"]
PROMPT = "Tom has 3 boxes. Ünï 北京"


@pytest.fixture(scope="module")
def forced():
    """[tokens - 1, vocabulary] logprobs of each token behind the first in one plain forward."""
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)

    @torch.inference_mode()
    def run(tokens):
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1].log_softmax(-1)

    return run


def complete(client, **fields):
    return client.completions.create(**{"model": MODEL, "temperature": 0, "max_tokens": 0} | fields)


def assert_scored(found, tokens, want):
    """Logprobs of these tokens in OpenAI's form, of which the first has none."""
    own = [row[token].item() for row, token in zip(want, tokens[1:], strict=True)]
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert found.token_logprobs[1:] == pytest.approx(own, abs=1e-3)
    best = [max(top.values()) for top in found.top_logprobs[1:]]
    assert best == pytest.approx(want.amax(-1).tolist(), abs=1e-3)
    assert [top[token] for top, token in zip(found.top_logprobs[1:], found.tokens[1:], strict=True)] == (
        found.token_logprobs[1:]
    )


def counts(usage):
    """How many tokens; how many of them were run before is another matter each time."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


@pytest.mark.parametrize("max_tokens", [0, 1, 12])
@pytest.mark.parametrize("prompt", [PROMPT, QUESTION], ids=["short", "long"])
def test_an_echo_begins_with_the_prompt_and_its_logprobs(client, tokenizer, forced, prompt, max_tokens):
    choice = complete(
        client,
        prompt=prompt,
        echo=True,
        logprobs=2,
        max_tokens=max_tokens,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ).choices[0]
    tokens = [*tokenizer(prompt)["input_ids"], *choice.token_ids]
    assert len(choice.token_ids) == max_tokens
    assert_scored(choice.logprobs, tokens, forced(tokens))
    assert choice.text.startswith(prompt)
    for token, begin, id in zip(choice.logprobs.tokens, choice.logprobs.text_offset, tokens, strict=True):
        if id not in tokenizer.all_special_ids and "\\x" not in token:
            assert choice.text[begin : begin + len(token)] == token
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)


def loglikelihood(choice, context):
    """What lm_eval reads of a choice: (the continuation's logprob, whether it is the greedy one).

    As `LocalCompletionsAPI.parse_logprobs` of lm_eval's `openai_completions.py`, whose requests generate one token.
    """
    logprobs, top = choice.logprobs.token_logprobs[context:-1], choice.logprobs.top_logprobs[context:-1]
    return sum(logprobs), all(one == max(likeliest.values()) for one, likeliest in zip(logprobs, top, strict=True))


def test_continuations_are_scored_as_lm_eval_asks(client, tokenizer, forced):
    context = tokenizer(QUESTION)["input_ids"]
    greedy = complete(client, prompt=context, max_tokens=5, extra_body={"return_token_ids": True}).choices[0].token_ids
    endings = [greedy, tokenizer(" 12 apples")["input_ids"], tokenizer("x")["input_ids"]]
    prompts = [[*context, *ending] for ending in endings]
    answer = complete(client, prompt=prompts, echo=True, logprobs=1, max_tokens=1, seed=1234)
    got = [loglikelihood(choice, len(context)) for choice in answer.choices]
    for (logprob, is_greedy), ending, tokens in zip(got, endings, prompts, strict=True):
        rows = forced(tokens)[len(context) - 1 :]
        want = sum(row[token].item() for row, token in zip(rows, ending, strict=True))
        assert logprob == pytest.approx(want, abs=1e-2)
        assert is_greedy == (rows.argmax(-1).tolist() == list(ending))
    assert [is_greedy for _, is_greedy in got] == [True, False, False]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


def test_token_ids_are_repeated_as_their_text(client, tokenizer):
    tokens = tokenizer(PROMPT)["input_ids"]
    by_ids, by_text = (complete(client, prompt=prompt, echo=True, logprobs=0).choices[0] for prompt in (tokens, PROMPT))
    assert by_ids.text == by_text.text == PROMPT
    assert by_ids.logprobs.tokens == by_text.logprobs.tokens
    assert by_ids.logprobs.text_offset == by_text.logprobs.text_offset
    end = complete(client, prompt=[tokenizer.eos_token_id, *tokens], echo=True).choices[0]
    assert end.text == tokenizer.eos_token + PROMPT


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 9}, {"max_tokens": 9, "logprobs": None}, {"stop": [" the"]}])
def test_a_streamed_echo_adds_up(client, fields):
    fields = {"prompt": ["Tom", QUESTION], "echo": True, "logprobs": 1, "n": 2} | fields
    whole = complete(client, **fields)
    chunks = [choice for chunk in complete(client, stream=True, **fields) for choice in chunk.choices]
    for choice in whole.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in mine) == choice.text
        said = [chunk.logprobs for chunk in mine if chunk.logprobs]
        assert bool(said) == (choice.logprobs is not None)
        if choice.logprobs:
            assert [token for part in said for token in part.tokens] == choice.logprobs.tokens
            assert [offset for part in said for offset in part.text_offset] == choice.logprobs.text_offset
            got = [value for part in said for value in part.token_logprobs]
            assert got[0] is None
            assert got[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


def test_an_echo_without_logprobs_is_the_prompt_and_the_answer(client):
    plain = complete(client, prompt="Tom has", max_tokens=6).choices[0]
    echo = complete(client, prompt="Tom has", max_tokens=6, echo=True).choices[0]
    assert echo.text == "Tom has" + plain.text
    assert echo.logprobs is None


def test_n_choices_of_each_prompt_come_in_its_order(client):
    prompts = ["Tom has", "Ann had 12"]
    answer = complete(client, prompt=prompts, n=3, echo=True, temperature=1.2, seed=3, max_tokens=4)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text.startswith(prompts[choice.index // 3]) for choice in answer.choices] == [True] * 6


def test_best_of_returns_the_likeliest_and_counts_them_all(client):
    fields = {"prompt": ["Tom has", QUESTION], "temperature": 1.3, "seed": 5, "max_tokens": 8}
    every = complete(client, n=5, logprobs=0, **fields)
    picked = complete(client, n=2, best_of=5, **fields)
    for place in range(2):
        run = every.choices[5 * place : 5 * place + 5]
        means = [(sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens), choice.text) for choice in run]
        best = [text for _, text in sorted(means, reverse=True)[:2]]
        assert [choice.text for choice in picked.choices[2 * place : 2 * place + 2]] == best
    assert [choice.index for choice in picked.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in picked.choices)
    assert counts(picked.usage) == counts(every.usage)


BAD = [
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 2, "store_activations": True}, "best_of"),
    ({"suffix": " the end"}, "suffix"),
    ({"echo": "yes"}, "echo"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 6}, "logprobs"),
    ({"prompt": [99999999], "echo": True}, "prompt"),
    ({"prompt": [-1], "echo": True}, "prompt"),
    ({"prompt": "", "echo": True}, "prompt"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("changes", "param"), BAD, ids=[str(list(bad[0].items())[0]) for bad in BAD])
def test_what_cannot_be_is_refused_by_the_name_of_its_field(served, changes, param):
    body = {"model": MODEL, "prompt": "Tom", "max_tokens": 2} | changes
    answer = httpx.post(f"{served.base_url}/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error


def test_best_of_as_many_as_n_streams(client):
    chunks = list(complete(client, prompt="Tom", max_tokens=3, best_of=2, n=2, stream=True))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_a_completion_tells_its_token_ids(client, tokenizer):
    prompts, more = ["Tom has 3", PROMPT], {"return_token_ids": True}
    fields = {"prompt": prompts, "max_tokens": 12, "stop": [" the", "."], "extra_body": more}
    whole = complete(client, **fields)
    chunks = [choice for chunk in complete(client, stream=True, **fields) for choice in chunk.choices]
    for prompt, choice in zip(prompts, whole.choices, strict=True):
        assert choice.prompt_token_ids == tokenizer(prompt)["input_ids"]
        assert tokenizer.decode(choice.token_ids, skip_special_tokens=True).startswith(choice.text)
        mine = [chunk.model_extra for chunk in chunks if chunk.index == choice.index]
        assert [extra["prompt_token_ids"] for extra in mine if "prompt_token_ids" in extra] == [choice.prompt_token_ids]
        assert [id for extra in mine for id in extra.get("token_ids", ())] == choice.token_ids
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)


def test_a_chat_tells_its_token_ids(client, tokenizer):
    messages = [{"role": "user", "content": QUESTION}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": 20, "n": 2, "seed": 4}
    fields["extra_body"] = {"return_token_ids": True}
    whole = client.chat.completions.create(**fields)
    assert whole.prompt_token_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    for choice in whole.choices:
        assert tokenizer.decode(choice.token_ids, skip_special_tokens=True) == choice.message.content
        mine = [one.model_extra for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert [id for extra in mine for id in extra.get("token_ids", ())] == choice.token_ids
