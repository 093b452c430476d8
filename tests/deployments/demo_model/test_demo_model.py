"""The demo model's parts: generator, tokenizer, templates, weights and problems."""

import json
import random
import re
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.demo_model import PROBLEMS, WEIGHTS
from deployments.demo_model.calculator import TOOL, work_out
from deployments.demo_model.dialogues import dress, tool_turns
from deployments.demo_model.evaluate import final_answer, read_problems, solve, summary
from deployments.demo_model.problems import HARD_SHARE, TRAIN_SEED, Problem, held_out, stream
from deployments.demo_model.train import spoken

ANNOTATION = re.compile(r"<<([^=<>]+)=([^=<>]+)>>(\d+)")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(WEIGHTS)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def sample() -> list[Problem]:
    return list(islice(stream(TRAIN_SEED), 3000))


def check_record(record: dict[str, str]) -> None:
    found = ANNOTATION.findall(record["answer"])
    assert 2 <= len(found) <= 5
    for expression, value, shown in found:
        assert work_out(expression) == Fraction(value)
        assert value == shown
    assert final_answer(record["answer"]) == int(found[-1][1])
    assert record["answer"].splitlines()[-1] == f"#### {found[-1][1]}"


def test_generated_annotations_and_answers_are_true(sample: list[Problem]) -> None:
    for problem in sample:
        check_record(problem.gsm8k())
        assert "{" not in problem.question + problem.text_solution()


def test_mixture_is_as_stated(sample: list[Problem]) -> None:
    share = sum(problem.hard for problem in sample) / len(sample)
    assert abs(share - HARD_SHARE) < 0.04
    for problem in sample:
        factors = [step.expression.split("*") for step in problem.steps if "*" in step.expression]
        hard = [pair for pair in factors if min(map(int, pair)) >= 12 and max(map(int, pair)) >= 13]
        assert len(hard) == int(problem.hard)


def test_streams_are_seeded() -> None:
    first, second = (list(islice(stream(3), 20)) for _ in range(2))
    assert first == second
    assert first != list(islice(stream(4), 20))


def test_demo_problems_are_valid_and_held_out(sample: list[Problem]) -> None:
    records = [json.loads(line) for line in PROBLEMS.read_text(encoding="utf-8").splitlines()]
    assert len({record["question"] for record in records}) == len(records) == 200
    for record in records:
        assert set(record) == {"question", "answer"}
        check_record(record)
    assert records == [problem.gsm8k() for problem in held_out(200)]
    seen = {problem.question for problem in sample}
    assert not seen & {record["question"] for record in records}


def test_excluded_questions_never_come() -> None:
    excluded = frozenset(problem.question for problem in islice(stream(5), 10))
    assert not excluded & {problem.question for problem in islice(stream(5, excluded), 100)}


@given(text=st.text())
def test_any_text_goes_through_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < len(tokenizer) for i in ids)


def test_digits_are_tokens_of_their_own(tokenizer: Any) -> None:
    assert tokenizer.tokenize("14*23=322") == list("14*23=322")


def with_call(arguments: object) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "322"},
    ]


def test_template_renders_tools_parts_and_both_kinds_of_arguments(tokenizer: Any) -> None:
    expected = (
        "<|im_start|>system\nBe brief.\n<tools>\ncalculator(expression)\n</tools><|im_end|>\n"
        "<|im_start|>user\nHi you<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "14*23"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\n322\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    short = {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}}
    for arguments in ({"expression": "14*23"}, '{"expression": "14*23"}'):
        for tool in (TOOL, short):
            text = tokenizer.apply_chat_template(
                with_call(arguments), tools=[tool], tokenize=False, add_generation_prompt=True
            )
            assert text == expected


def test_template_without_tools(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nB<|im_end|>\n"


def test_tokens_of_a_prefix_are_a_prefix_of_the_tokens(tokenizer: Any, sample: list[Problem]) -> None:
    for problem in sample[:20]:
        messages = [{"role": "user", "content": problem.question}, *tool_turns(problem)]
        whole = tokenizer.apply_chat_template(messages, tools=[TOOL], return_dict=False)
        for cut in range(1, len(messages)):
            for prompt in (False, True):
                if prompt and messages[cut]["role"] != "assistant":
                    continue
                part = tokenizer.apply_chat_template(
                    messages[:cut], tools=[TOOL], add_generation_prompt=prompt, return_dict=False
                )
                assert whole[: len(part)] == part


def test_parse_response_recovers_what_the_template_writes(tokenizer: Any, sample: list[Problem]) -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for message in tool_turns(sample[0]):
        if message["role"] != "assistant":
            continue
        text = tokenizer.apply_chat_template([message], tokenize=False)
        text = text.removeprefix("<|im_start|>assistant\n")
        for ending in ("", "<|im_end|>", "<|im_end|>\n"):
            said = text.removesuffix("<|im_end|>\n") + ending
            assert tokenizer.parse_response(said, prefix=prompt) == message


def test_only_what_the_assistant_says_is_learned(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "#### 4"},
        {"role": "user", "content": "and 3+3?"},
        {"role": "assistant", "content": "#### 6"},
    ]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    marks = spoken(ids, tokenizer("<|im_start|>assistant\n").input_ids, tokenizer.eos_token_id)
    said = tokenizer.decode([i for i, mark in zip(ids, marks, strict=True) if mark])
    assert said == "#### 4<|im_end|>#### 6<|im_end|>"


def test_dressing_keeps_the_question() -> None:
    rng = random.Random(0)
    assert all("How many?" in dress("How many?", rng) for _ in range(100))


def test_summary_pairs_the_two_modes() -> None:
    figures = summary([True, False, False, True], [True, True, False, True])
    assert figures["without_tools"] == 50.0
    assert figures["with_tools"] == 75.0
    assert figures["difference"] == 25.0
    assert figures["difference_low"] < 25.0 < figures["difference_high"]


def test_files_and_context(model: Any) -> None:
    assert (WEIGHTS / "model.safetensors").stat().st_size <= 10_000_000
    assert model.config.model_type == "qwen3"
    assert model.config.max_position_embeddings >= 2048
    with torch.inference_mode():
        logits = model(torch.zeros((1, 2048), dtype=torch.long)).logits
    assert logits.shape == (1, 2048, model.config.vocab_size)


def test_model_solves_some_but_not_all(model: Any, tokenizer: Any) -> None:
    questions, gold = read_problems(PROBLEMS)
    right = {}
    for tools in (False, True):
        answers = solve(model, tokenizer, questions[:12], tools)
        right[tools] = sum(a == b for a, b in zip(answers, gold[:12], strict=True))
    assert 3 <= right[False] < 12
    assert right[True] >= right[False]
