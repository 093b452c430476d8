"""What an OpenAI client gets from the served model."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.demo_model import PROBLEMS, WEIGHTS

MODEL = "vitrine-demo"
QUESTIONS = [json.loads(line)["question"] for line in PROBLEMS.read_text().splitlines()[:16]]
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def hf():
    """The same weights, as transformers runs them alone."""
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)

    def generate(question: str, new_tokens: int) -> tuple[list[int], str]:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        new = out[0, ids.shape[1] :].tolist()
        return new, tokenizer.decode(new, skip_special_tokens=True)

    return generate


def ask(client, question, **fields):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0} | fields)


def counts(usage):
    """How many tokens; how many of them were run before is another matter each time."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_16_chats_served_together_say_what_generate_says_alone(client, hf):
    eos = AutoTokenizer.from_pretrained(WEIGHTS).eos_token_id
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda question: ask(client, question, max_tokens=24), QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        tokens, text = hf(question, 24)
        assert answer.choices[0].message.content == text
        assert answer.usage.completion_tokens == len(tokens)
        assert answer.choices[0].finish_reason == ("stop" if tokens[-1] == eos else "length")


def test_a_seed_repeats_a_draw_and_the_choices_differ(client):
    first, again = (ask(client, QUESTIONS[1], n=4, seed=7, temperature=1.5, max_tokens=24) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    one = ask(client, QUESTIONS[1], seed=7, temperature=1.5, max_tokens=24)
    assert first.usage.prompt_tokens == one.usage.prompt_tokens


def test_tool_choice_none_hides_the_tools(client):
    plain = ask(client, QUESTIONS[0], max_tokens=16)
    hidden = ask(client, QUESTIONS[0], tools=[CALCULATOR], tool_choice="none", max_tokens=16)
    assert hidden.choices[0].message.content == plain.choices[0].message.content
    assert counts(hidden.usage) == counts(plain.usage)


def test_completions_take_texts_and_token_ids_alike(client):
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    prompts = ["Tom has 3 boxes.", "Ann has 12 pens."]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    texts = client.completions.create(model=MODEL, prompt=prompts, temperature=0)
    tokens = client.completions.create(model=MODEL, prompt=ids, temperature=0)
    assert [choice.text for choice in texts.choices] == [choice.text for choice in tokens.choices]
    assert counts(texts.usage) == counts(tokens.usage)
    assert texts.usage.completion_tokens <= 2 * 16
    one = client.completions.create(model=MODEL, prompt=ids[1], temperature=0)
    assert one.choices[0].text == texts.choices[1].text


def test_health_says_what_is_loaded(served):
    answer = httpx.get(f"{served.root}/health", timeout=60)
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "loaded_models": [MODEL], "replicas": {MODEL: {"RUNNING": 1}}}
