"""The parts of a conversation are found in its text, and as the tokens that hold them."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.labels.spans import Span, characters, token_span
from evals.scoring import find_normalized

PROMPT = "Ann has 3 boxes of 12 pens and 36 more. How many?"


def call(expression: str, name: str = "calculator") -> dict[str, Any]:
    return {"id": "call-36", "function": {"name": name, "arguments": json.dumps({"expression": expression})}}


def said(content: str | None, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def written(messages: list[dict[str, Any]], thoughts: str = "", spaced: bool = True) -> str:
    """As a chat template with `<tool_call>` writes it; the arguments as `tojson` does, or as they came."""
    text = f"<|im_start|>system\ncalculator(expression): 36<|im_end|>\n<|im_start|>user\n{PROMPT}<|im_end|>\n"
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        if message is messages[-1]:
            text += thoughts
        if message["role"] == "tool":
            text += f"<tool_response>\n{message['content']}\n</tool_response>"
        text += (message["content"] or "") if message["role"] == "assistant" else ""
        for made in message.get("tool_calls", ()):
            arguments = json.loads(made["function"]["arguments"])
            dumped = json.dumps(arguments, ensure_ascii=False) if spaced else made["function"]["arguments"]
            text += f'<tool_call>\n{{"name": "{made["function"]["name"]}", "arguments": {dumped}}}\n</tool_call>'
        text += "<|im_end|>\n"
    return text


def shown(text: str, messages: list[dict[str, Any]]) -> list[str | None]:
    """What is found, and the answer with the three characters before it."""
    content = str(messages[-1]["content"] or "")
    answer = find_normalized(content)
    scored = (content, (answer.start, answer.end)) if answer else None
    found = characters(text, PROMPT, messages, scored)
    number = found.answer and text[found.answer[0] - 3 : found.answer[1]]
    return [number, *(part and text[slice(*part)] for part in found[1:])]


CALLED = 'calculator", "arguments": {{"expression": "{}"}}'


@pytest.mark.parametrize("spaced", [True, False])
def test_each_part_is_found_where_it_was_said_and_not_where_its_text_comes_before(spaced: bool) -> None:
    messages = [said("I take 3 * 12.", call("3 * 12")), result("36"), said("So 36 and 36.\n#### **36**")]
    text = written(messages, thoughts="<think>\nSo 36 and 36.\n#### **36**?\n</think>\n\n", spaced=spaced)
    assert shown(text, messages) == [" **36", CALLED.format("3 * 12"), "36"]
    content, answer = str(messages[-1]["content"]), find_normalized(str(messages[-1]["content"]))
    assert answer
    found = characters(text, PROMPT, messages, (content, (answer.start, answer.end)))
    assert found.answer == (text.rindex("**36**") + 2, text.rindex("**36**") + 4)
    assert found.tool_results == (text.index("<tool_response>\n36") + 16, text.index("<tool_response>\n36") + 18)


def test_of_several_turns_the_last_calls_and_results_count_and_those_of_one_turn_together() -> None:
    first, second = [said(None, call("1 + 1")), result("2")], [said(None, call("3 * 12"), call("36 / 2"))]
    messages = [*first, *second, result("36"), result("18"), said("#### 18")]
    _, calls, results = shown(written(messages), messages)
    assert calls
    assert results
    assert calls.startswith(CALLED.format("3 * 12"))
    assert calls.endswith(CALLED.format("36 / 2"))
    assert (results[:2], results[-2:]) == ("36", "18")
    turn = messages[:3]  # as its run was recorded: its own calls, and the results before them
    _, calls, results = shown(written(turn), turn)
    assert calls
    assert calls.endswith(CALLED.format("36 / 2"))
    assert results == "2"


def test_a_result_is_no_part_of_a_longer_number_or_id() -> None:
    messages = [said(None, call("6 / 2")), result("3"), said("#### 3")]
    text = written(messages).replace("<tool_response>\n", '{"id": "call-36", "value": 33, "content": "').replace(
        "\n</tool_response>", '"}'
    )  # fmt: skip
    found = characters(text, PROMPT, messages, None).tool_results
    assert found == (text.index('"content": "3"') + 12, text.index('"content": "3"') + 13)


@pytest.mark.parametrize(
    "messages",
    [
        [said("It is 36.")],
        [said(None)],
        [said(None, call("half an \ud83d", "other"))],
    ],
)
def test_what_is_not_there_is_none(messages: list[dict[str, Any]]) -> None:
    assert shown("<|im_start|>something else 36", messages) == [None, None, None]


def test_a_character_of_several_tokens_is_all_of_them() -> None:
    text, offsets = "It is\u221218.", np.array([0, 4, 5, 5, 6, 8])
    assert token_span((5, 8), text, np.arange(6), offsets, 9) == (2, 5)
    assert token_span((5, 6), "It is 18.", np.arange(6), offsets, 9) == (3, 4)  # the token before it adds no text


tokens = st.lists(st.text("a3é\n", max_size=4), min_size=1, max_size=30)


@given(tokens, st.data())
def test_a_part_is_the_tokens_that_hold_it_and_no_other(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = ends - [len(piece) for piece in pieces]
    first = data.draw(st.integers(0, len(pieces) - 1))
    behind = data.draw(st.integers(first + 1, len(pieces)))
    positions, offsets = np.arange(first, behind) + 7, starts[first:behind]
    last = len(text) if behind == len(pieces) else int(offsets[-1])
    low = data.draw(st.integers(0, len(text)))
    part: Span = (low, data.draw(st.integers(low, len(text))))
    found = token_span(part, text, positions, offsets, last)
    if part[0] < offsets[0] or part[1] > last:
        assert found is None
    elif part[0] < part[1]:
        assert found
        a, b = found[0] - 7, found[1] - 7
        assert first <= a < b <= behind
        assert starts[a] <= part[0]
        is_split = starts[a] == ends[a] == part[0] and text[part[0]] == "é"  # by the offsets, it may be
        assert part[0] < ends[a + is_split]
        assert starts[b - 1] < part[1] <= ends[b - 1]
