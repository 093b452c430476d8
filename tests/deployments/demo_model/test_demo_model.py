"""The demo model's problems, tokenizer, templates and weights."""

import json
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from deployments.demo_model import PROBLEMS, WEIGHTS
from deployments.demo_model.calculator import TOOL, work_out

ANNOTATION = re.compile(r"<<([^=<>]+)=([^=<>]+)>>(\d+)")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(WEIGHTS)


def test_problems_have_true_annotations_and_answers() -> None:
    records = [json.loads(line) for line in PROBLEMS.read_text(encoding="utf-8").splitlines()]
    assert len({record["question"] for record in records}) == len(records) == 200
    for record in records:
        assert set(record) == {"question", "answer"}
        found = ANNOTATION.findall(record["answer"])
        assert 2 <= len(found) <= 5
        for expression, value, shown in found:
            assert work_out(expression) == Fraction(value)
            assert value == shown
        assert record["answer"].splitlines()[-1] == f"#### {found[-1][1]}"


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


def test_tokens_of_a_prefix_are_a_prefix_of_the_tokens(tokenizer: Any) -> None:
    answer = {"role": "assistant", "content": "#### 322"}
    messages = [*with_call({"expression": "14*23"}), answer]
    whole = tokenizer.apply_chat_template(messages, tools=[TOOL], return_dict=False)
    for cut in range(1, len(messages)):
        for prompt in {False, messages[cut]["role"] == "assistant"}:
            part = tokenizer.apply_chat_template(
                messages[:cut], tools=[TOOL], add_generation_prompt=prompt, return_dict=False
            )
            assert whole[: len(part)] == part


@pytest.mark.parametrize("ending", ["", "<|im_end|>", "<|im_end|>\n"])
def test_parse_response_recovers_what_the_template_writes(tokenizer: Any, ending: str) -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    calling = with_call({"expression": "14*23"})[2] | {"content": "Tom buys 14*23 apples."}
    for message in (calling, {"role": "assistant", "content": "#### 322"}):
        text = tokenizer.apply_chat_template([message], tokenize=False).removeprefix("<|im_start|>assistant\n")
        said = text.removesuffix("<|im_end|>\n") + ending
        assert tokenizer.parse_response(said, prefix=prompt) == message
