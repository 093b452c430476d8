"""LangChain's ChatOpenAI."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def all_said(run_script):
    return run_script("langchain_chat.py")


def test_chats_are_whole_streamed_batched_and_scored(all_said):
    said = all_said["plain"]
    # The second request finds its prompt in the cache, which changes nothing but this count.
    cached = [usage.pop("input_token_details")["cache_read"] for _, usage, _ in (said["whole"], said["streamed"])]
    assert cached[0] == 0 < cached[1]
    assert said["whole"] == said["streamed"]
    text, usage, finish_reason = said["whole"]
    assert text
    assert finish_reason in ("stop", "length")
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert said["together"] == [said["alone"]] * 4
    assert said["scored"]


def test_tools_are_called_until_the_answer(all_said):
    said = all_said["tools"]
    assert said["calls"][0] == said["streamed"][0]
    assert all(name == "calculator" and set(arguments) == {"expression"} for name, arguments in said["calls"])
    assert said["answer"].startswith("#### ")


def test_an_answer_is_of_the_class_asked_for(all_said):
    assert [type(total) for total in all_said["structured"].values()] == [int, int]
