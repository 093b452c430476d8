"""Tokenizing and detokenizing, by the model's tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from deployments.activations import read_run

HTTP_PAGE = Path(__file__).parents[3] / "docs" / "http.md"
MODEL = "vitrine-demo"
PROMPT = "Tom has 3 boxes. Ünï 北京 <|im_end|>"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
PLAIN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
BEGUN = [*PLAIN, {"role": "assistant", "content": "The sum of 2 and 2"}]
CONTINUED = {"continue_final_message": True}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}


@pytest.fixture
def post(served):
    def post(route, **body):
        return httpx.post(f"{served.root}/{route}", json=body, timeout=60)

    return post


def test_a_prompt_is_tokenized(post, tokenizer):
    ids = tokenizer(PROMPT)["input_ids"]
    answer = post("tokenize", model=MODEL, prompt=PROMPT, return_token_strs=True).json()
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids)
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert answer["max_model_len"] >= 2048
    assert post("tokenize", prompt=PROMPT).json() == answer | {
        "token_strs": None,
        "token_texts": None,
    }  # of the model that is served


def test_the_position_of_a_word_is_that_of_its_captured_row(post, served):
    prompt = "Ann has 3 boxes of 12 pens."
    strings = post("tokenize", prompt=prompt, return_token_strs=True).json()["token_strs"]
    assert f'`"token_strs": {json.dumps(strings, ensure_ascii=False)}`' in HTTP_PAGE.read_text()
    capture = {"points": ["norm.output"], "mode": "trace"}
    body = {"model": MODEL, "prompt": prompt, "capture": capture}
    stored = post("v1/completions", **body).json()["activations_meta"]["runs"][0]
    run = read_run(stored["points"]["norm.output"]["uri"], stored["run_id"])
    position = strings.index("Ġboxes")
    assert position == 6
    assert post("detokenize", tokens=[int(run.token_ids[position])]).json()["prompt"] == " boxes"


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_are_added_or_not(post, tokenizer, special):
    answer = post("tokenize", model=MODEL, prompt="Tom", add_special_tokens=special).json()
    assert answer["tokens"] == tokenizer("Tom", add_special_tokens=special)["input_ids"]


@pytest.mark.parametrize(
    "fields",
    [{}, {"add_generation_prompt": False}, {"tools": [TOOL]}],
    ids=["plain", "without the answer", "tools"],
)
def test_a_chat_is_tokenized_by_the_models_template(post, tokenizer, fields):
    want = tokenizer.apply_chat_template(PLAIN, **{"add_generation_prompt": True} | fields)["input_ids"]
    assert post("tokenize", model=MODEL, messages=MESSAGES, **fields).json()["tokens"] == want


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}, CONTINUED])
def test_a_last_message_is_a_turn_of_its_own_or_continued(post, tokenizer, fields):
    ends = {"add_generation_prompt": not fields} | fields
    want = tokenizer.apply_chat_template(BEGUN, **ends)["input_ids"]
    assert post("tokenize", messages=BEGUN, **fields).json()["tokens"] == want
    plain = {"model": MODEL, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    answer = post("v1/chat/completions", messages=BEGUN, **plain, **fields).json()
    assert answer["prompt_token_ids"] == want
    told = post("v1/completions", prompt=want, **plain).json()["choices"][0]
    assert answer["choices"][0]["token_ids"] == told["token_ids"]
    assert answer["choices"][0]["message"]["content"] == told["text"]


def test_each_token_has_a_text_of_its_own_where_that_is_asked_for(post):
    told = post("tokenize", prompt=PROMPT, return_token_strs=True).json()
    answer = post("detokenize", tokens=told["tokens"], return_token_strs=True).json()
    assert answer == {"prompt": PROMPT, "token_texts": told["token_texts"]}


@pytest.mark.parametrize("prompt", [PROMPT, "", " \n "])
def test_tokens_become_their_text_again(post, prompt):
    tokens = post("tokenize", model=MODEL, prompt=prompt, add_special_tokens=False).json()["tokens"]
    assert post("detokenize", model=MODEL, tokens=tokens).json() == {"prompt": prompt}


BAD = [
    ("tokenize", {"model": "nope", "prompt": "x"}, 404, "model"),
    ("tokenize", {}, 400, "prompt"),
    ("tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
    ("tokenize", {"prompt": 5}, 400, "prompt"),
    ("tokenize", {"prompt": "x", "tools": [TOOL]}, 400, "tools"),
    ("tokenize", {"prompt": "x", "chat_template_kwargs": {"tone": "calm"}}, 400, "chat_template_kwargs"),
    ("tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs.tools"),
    ("tokenize", {"prompt": "x", "continue_final_message": True}, 400, "continue_final_message"),
    ("tokenize", {"messages": MESSAGES, "continue_final_message": True}, 400, "continue_final_message"),
    ("tokenize", {"messages": BEGUN, **CONTINUED, "add_generation_prompt": True}, 400, "continue_final_message"),
    ("tokenize", {"prompt": "x", "return_tokens": True}, 400, "return_tokens"),
    ("tokenize", {"prompt": "x" * 1_500_000}, 400, "prompt"),
    ("tokenize", {"messages": []}, 400, "messages"),
    ("tokenize", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    ("tokenize", {"messages": [{"role": "user", "content": "x" * 1_500_000}]}, 400, "messages"),
    ("detokenize", {"model": "nope", "tokens": [1]}, 404, "model"),
    ("detokenize", {}, 400, "tokens"),
    ("detokenize", {"tokens": [3, -1]}, 400, "tokens[1]"),
    ("detokenize", {"tokens": [99999999]}, 400, "tokens"),
    ("detokenize", {"tokens": [10**30]}, 400, "tokens[0]"),
    ("detokenize", {"tokens": "Tom"}, 400, "tokens"),
    ("detokenize", {"tokens": [1] * 500_000}, 400, "tokens"),
]


@pytest.mark.parametrize(("route", "body", "status", "param"), BAD, ids=[f"{bad[0]} {bad[3]}" for bad in BAD])
def test_what_cannot_be_is_refused_by_the_name_of_its_field(post, route, body, status, param):
    answer = post(route, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error


def test_an_answer_may_be_larger_than_grpcs_usual_messages(served):
    body = {"model": "vitrine-demo", "prompt": [[5] * 4000] * 7, "max_tokens": 0, "echo": True, "logprobs": 5}
    answer = httpx.post(f"{served.base_url}/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text[:500]
    assert len(answer.content) > 4 << 20
