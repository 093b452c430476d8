"""If a client disconnects, its request ends."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIMIT_S = 1.0
CLIENT = """
import json, sys, httpx
with httpx.stream("POST", sys.argv[1], json=json.loads(sys.argv[2]), timeout=60) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_killing_a_client_frees_its_slot_within_a_second(served, stream, statistics, eventually):
    def until(wanted: int, limit_s: float) -> None:
        eventually(statistics, lambda now: now["running"] == wanted, limit_s)

    until(0, 30)
    body = {"model": "vitrine-demo", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    command = [sys.executable, "-c", CLIENT, f"{served.base_url}/completions", json.dumps(body)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE)
    if stream:
        assert client.stdout.readline().startswith(b"data: ")
    until(1, 30)
    client.kill()
    client.communicate()
    until(0, LIMIT_S)
