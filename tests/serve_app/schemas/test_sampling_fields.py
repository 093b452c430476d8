"""Every sampling field of a request has its effect in the engine."""

from __future__ import annotations

import pytest

from deployments.activations import read_run
from deployments.engine.request import Sampling
from serve_app.schemas.generation import ChatRequest

MODEL = "vitrine-demo"
PROMPT = "Tom has 3 boxes of"


def complete(client, **fields):
    fields = {"temperature": 0, "max_tokens": 24} | fields
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTRA}
    return client.completions.create(model=MODEL, prompt=PROMPT, extra_body=extra, logprobs=0, **fields).choices[0]


EXTRA = {"min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "top_k"}


def test_fields_become_settings():
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "min_p": 0.1, "repetition_penalty": 1.2}
    body |= {"presence_penalty": 0.3, "frequency_penalty": -0.4, "logit_bias": {"12": 1.5, "0": -100}, "min_tokens": 4}
    common = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    got = ChatRequest.model_validate(common | body).sampling
    assert got == Sampling(**(body | {"logit_bias": {12: 1.5, 0: -100.0}}))
    assert ChatRequest.model_validate(common | dict.fromkeys(body)).sampling == Sampling()
    assert ChatRequest.model_validate(common | {"top_k": -1}).sampling == Sampling()  # as vLLM says that there is none


def test_a_template_gets_no_empty_list_of_calls():
    told = {"role": "assistant", "content": "x"}
    body = {"model": MODEL, "messages": [told | {"tool_calls": []}]}
    assert [message.spoken for message in ChatRequest.model_validate(body).messages] == [told]


def test_logit_bias_forces_and_forbids(client, tokenizer):
    (id,) = tokenizer(" apples")["input_ids"][:1]
    word = tokenizer.decode([id])
    assert complete(client, logit_bias={str(id): 100}, max_tokens=4).text == word * 4
    plain = complete(client)
    first = tokenizer(plain.logprobs.tokens[0])["input_ids"][0]
    assert complete(client, logit_bias={str(first): -100}).logprobs.tokens[0] != plain.logprobs.tokens[0]


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_penalty_makes_for_more_different_tokens(client, penalty):
    most = {"repetition_penalty": 100.0}.get(penalty, 2.0)
    bias = {str(id): 30.0 for id in range(20, 60)}  # a few tokens that would be said again and again
    fields = {"max_tokens": 60, "ignore_eos": True, "logit_bias": bias}
    plain, penalized = complete(client, **fields), complete(client, **fields, **{penalty: most})
    assert len(set(penalized.logprobs.tokens)) > len(set(plain.logprobs.tokens))


def test_min_tokens_puts_off_the_end(client, tokenizer):
    ends = {"logit_bias": {str(tokenizer.eos_token_id): 100}}
    assert complete(client, **ends).logprobs.tokens == [tokenizer.eos_token]
    late = complete(client, **ends, min_tokens=7)
    assert len(late.logprobs.tokens) == 8
    assert late.finish_reason == "stop"
    assert tokenizer.eos_token not in late.logprobs.tokens[:7]


def test_a_stop_token_id_ends_the_text_and_is_not_shown(client, tokenizer):
    plain = complete(client, ignore_eos=True)
    ids = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(token))[0] for token in plain.logprobs.tokens]
    cut = complete(client, ignore_eos=True, stop_token_ids=[ids[6]])
    first = ids.index(ids[6])
    assert cut.finish_reason == "stop"
    assert cut.text == "".join(plain.logprobs.tokens[:first])
    assert cut.logprobs.tokens == plain.logprobs.tokens[: first + 1]


def test_min_p_of_one_is_greedy(client):
    assert complete(client, temperature=2.0, min_p=1.0).text == complete(client).text


def test_a_run_remembers_how_its_tokens_were_drawn(client):
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=3,
        logit_bias={"40": 2},
        extra_body={"capture": {"points": ["norm.output"], "required": True}, "min_p": 0.25},
    )
    (run,) = answer.activations_meta["runs"]
    sampling = read_run(run["points"]["norm.output"]["uri"], run_id=run["run_id"]).facts.sampling
    assert sampling["logit_bias"] == {"40": 2.0}
    assert sampling["min_p"] == 0.25
