"""If a client disconnects, its request ends."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MOST_STEPS = 1000  # of the engine, about a second of an idle machine; the whole answer takes 4000
CLIENT = """
import json, sys, httpx
with httpx.stream("POST", sys.argv[1], json=json.loads(sys.argv[2]), timeout=60) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_killing_a_client_frees_its_slot_long_before_the_answers_end(served, stream, statistics, eventually):
    def until(running: int) -> int:
        return eventually(statistics, lambda now: now["running"] == running)["steps"]

    until(0)
    body = {"model": "vitrine-demo", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    command = [sys.executable, "-c", CLIENT, f"{served.base_url}/completions", json.dumps(body)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE)
    if stream:
        assert client.stdout.readline().startswith(b"data: ")
    steps = until(1)
    client.kill()
    client.communicate()
    assert until(0) - steps < MOST_STEPS
