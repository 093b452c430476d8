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
        answers = list(pool.map(lambda question: ask(client, question, max_tokens=48), QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        tokens, text = hf(question, 48)
        assert answer.choices[0].message.content == text
        assert answer.usage.completion_tokens == len(tokens)
        assert answer.choices[0].finish_reason == ("stop" if tokens[-1] == eos else "length")


def test_a_stream_adds_up_to_the_whole_answer(client):
    whole = ask(client, QUESTIONS[0], max_tokens=40)
    chunks = list(ask(client, QUESTIONS[0], max_tokens=40, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert counts(chunks[-1].usage) == counts(whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


def test_max_tokens_ends_an_answer_with_length(client):
    answer = ask(client, QUESTIONS[0], max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def test_a_stop_string_ends_an_answer_before_it(client):
    whole = ask(client, QUESTIONS[0], max_tokens=40).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    cut = ask(client, QUESTIONS[0], max_tokens=40, stop=[stop, "never said"])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_seed_repeats_a_draw_and_the_choices_differ(client):
    first, again = (ask(client, QUESTIONS[1], n=4, seed=7, temperature=1.5, max_tokens=24) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    one = ask(client, QUESTIONS[1], seed=7, temperature=1.5, max_tokens=24)
    assert first.usage.prompt_tokens == one.usage.prompt_tokens


def test_top_p_of_nothing_is_greedy(client):
    greedy = ask(client, QUESTIONS[2], max_tokens=16)
    narrow = ask(client, QUESTIONS[2], max_tokens=16, temperature=1, top_p=0.0)
    assert narrow.choices[0].message.content == greedy.choices[0].message.content


def test_a_model_given_tools_calls_them_as_openai_says(client):
    whole = ask(client, QUESTIONS[0], tools=[CALCULATOR], max_tokens=128)
    assert whole.choices[0].finish_reason == "tool_calls"
    call = whole.choices[0].message.tool_calls[0]
    assert call.function.name == "calculator"
    assert json.loads(call.function.arguments)["expression"]
    chunks = list(ask(client, QUESTIONS[0], tools=[CALCULATOR], max_tokens=128, stream=True))
    streamed = [c for chunk in chunks if chunk.choices for c in chunk.choices[0].delta.tool_calls or []]
    assert "".join(c.function.arguments for c in streamed) == call.function.arguments
    messages = [
        {"role": "user", "content": QUESTIONS[0]},
        whole.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "12"},
    ]
    further = client.chat.completions.create(model=MODEL, messages=messages, tools=[CALCULATOR], max_tokens=64)
    assert further.usage.prompt_tokens > whole.usage.prompt_tokens


def test_tool_choice_none_hides_the_tools(client):
    plain = ask(client, QUESTIONS[0], max_tokens=16)
    hidden = ask(client, QUESTIONS[0], tools=[CALCULATOR], tool_choice="none", max_tokens=16)
    assert hidden.choices[0].message.content == plain.choices[0].message.content
    assert counts(hidden.usage) == counts(plain.usage)


def test_content_parts_are_joined(client):
    parts = [{"type": "text", "text": QUESTIONS[0][:20]}, {"type": "text", "text": QUESTIONS[0][20:]}]
    in_parts, whole = (ask(client, asked, max_tokens=8).usage for asked in (parts, QUESTIONS[0]))
    assert counts(in_parts) == counts(whole)


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


def test_a_streamed_completion_adds_up(client):
    fields = {"model": MODEL, "prompt": "Tom has 3 boxes.", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**fields).choices[0].text
    assert "".join(c.choices[0].text for c in client.completions.create(**fields, stream=True)) == whole


def test_any_text_goes_through(client):
    text = "Ω≈ç√ 你好 🧮 \x01 <|im_end|> żółć"
    assert ask(client, text, max_tokens=4).usage.completion_tokens > 0


def test_models_are_listed(client):
    listed = client.models.list().data
    assert [model.id for model in listed] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_health_says_what_is_loaded(served):
    answer = httpx.get(f"{served.root}/health", timeout=60)
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "loaded_models": [MODEL], "replicas": {MODEL: {"RUNNING": 1}}}


def test_the_schema_of_every_route_is_published(served):
    paths = httpx.get(f"{served.root}/openapi.json", timeout=60).json()["paths"]
    assert {"/health", "/v1/models", "/v1/chat/completions", "/v1/activations/sessions"} <= set(paths)
    assert httpx.get(f"{served.root}/docs", timeout=60).status_code == 200
