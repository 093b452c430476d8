"""Whatever one client makes a model write, other clients are not delayed."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deployments.chat.response_templates import LLAMA
from deployments.demo_model import WEIGHTS

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def llama_form(tmp_path_factory):
    """The shipped model, whose tokenizer says that it writes calls as Llama 3 does."""
    directory = tmp_path_factory.mktemp("model") / "llama-form"
    shutil.copytree(WEIGHTS, directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["response_template"]["fields"] = {"tool_calls": LLAMA, "content": {}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_chat_with_tools_that_writes_nothing_but_spaces_is_read_like_any_other(another_app, llama_form, tokenizer):
    """By expressions that backtrack, these spaces would take several times as long as the same number of letters."""
    space, letter = (tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in (" ", "a"))
    chat = {"model": "flooded", "messages": [{"role": "user", "content": "Go"}], "tools": [TOOL], "max_tokens": 1500}
    short = {"model": "flooded", "prompt": "Two and two", "max_tokens": 8, "temperature": 0}
    limit_s = 500.0
    with another_app("flooded", f"model={llama_form}", "model_id=flooded") as root, ThreadPoolExecutor() as threads:
        for token, text in ((letter, "a"), (space, " ")):
            body = chat | {"logit_bias": {str(token): 100}}
            began = time.monotonic()
            flooding = threads.submit(httpx.post, f"{root}/v1/chat/completions", json=body, timeout=limit_s)
            while not flooding.done():
                httpx.post(f"{root}/v1/completions", json=short, timeout=limit_s).raise_for_status()
            answer = flooding.result().raise_for_status().json()
            assert answer["choices"][0]["message"]["content"] == text * 1500
            limit_s = 4 * (time.monotonic() - began)  # for the spaces and for who asks beside them
