"""What one client lets a model write holds no other client up."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deployments.demo_model import WEIGHTS
from deployments.formats import LLAMA

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
LIMIT_S = 60  # reading this flood by expressions that backtrack takes several minutes


@pytest.fixture(scope="module")
def llama_form(tmp_path_factory):
    """The shipped model, whose tokenizer says that it writes calls as Llama 3 does."""
    directory = tmp_path_factory.mktemp("model") / "llama-form"
    shutil.copytree(WEIGHTS, directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["response_template"]["fields"] = {"tool_calls": LLAMA, "content": {}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_tools_that_writes_nothing_but_spaces_is_read_and_others_go_on(
    beside, llama_form, tokenizer, stream
):
    (space,) = tokenizer(" ", add_special_tokens=False)["input_ids"]
    common = {"model": "flooded", "temperature": 0}
    flood = common | {
        "messages": [{"role": "user", "content": "Go"}],
        "tools": [TOOL],
        "logit_bias": {str(space): 100},
        "max_tokens": 2000,
        "stream": stream,
    }
    name = f"flooded-{stream}".lower()
    with beside(name, f"model={llama_form}", "model_id=flooded") as root, ThreadPoolExecutor() as threads:
        flooding = threads.submit(httpx.post, f"{root}/v1/chat/completions", json=flood, timeout=LIMIT_S)
        while not flooding.done():
            short = common | {"prompt": "Two and two", "max_tokens": 8}
            httpx.post(f"{root}/v1/completions", json=short, timeout=LIMIT_S).raise_for_status()
        answer = flooding.result()
    assert answer.status_code == 200, answer.text
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        content = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    else:
        content = answer.json()["choices"][0]["message"]["content"]
    assert content == " " * 2000
