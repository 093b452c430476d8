"""Whatever one client makes a model write, other clients are not delayed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.long  # test_linear_reading counts the searching
def test_a_chat_with_tools_that_writes_nothing_but_spaces_is_read_like_any_other(small_store, tokenizer):
    """By expressions that backtrack, these spaces would take several times as long as the same number of letters."""
    space, letter = (tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in (" ", "a"))
    chat = {"model": "vitrine-demo", "messages": [{"role": "user", "content": "Go"}], "tools": [TOOL]}
    short = {"model": "vitrine-demo", "prompt": "Two and two", "max_tokens": 8, "temperature": 0}
    limit_s = 500.0
    root, _ = small_store
    with ThreadPoolExecutor() as threads:
        for token, text in ((letter, "a"), (space, " ")):
            body = chat | {"max_tokens": 1500, "logit_bias": {str(token): 100}}
            began = time.monotonic()
            flooding = threads.submit(httpx.post, f"{root}/v1/chat/completions", json=body, timeout=limit_s)
            while not flooding.done():
                httpx.post(f"{root}/v1/completions", json=short, timeout=limit_s).raise_for_status()
            answer = flooding.result().raise_for_status().json()
            assert answer["choices"][0]["message"]["content"] == text * 1500
            limit_s = 4 * (time.monotonic() - began)  # for the spaces and for who asks beside them
