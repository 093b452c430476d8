"""Requests that record while the store's disk is full. Run by test_disks in a namespace where the tests may mount."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from deployments.activations import read_run

BODY = {"model": "vitrine-demo", "prompt": "Tom has 3.", "max_tokens": 4, "temperature": 0}
STORING = BODY | {"store_activations": True, "session_id": "s"}
REQUIRED = STORING | {"capture": {"points": ["norm.output"], "required": True}}


@pytest.fixture(scope="session")
def disk(cluster):
    """A small disk where the server's activations go, before it starts."""
    root = Path(cluster.env["VITRINE_HOME"]) / "activations"
    root.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", root], check=True)
    return root


def fill(path):
    """Take all the room that there is."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            return


def test_answers_come_without_their_activations_until_there_is_room(disk, request, eventually):
    served = request.getfixturevalue("served")  # behind the disk

    def ask(body):
        return httpx.post(f"{served.base_url}/completions", json=body, timeout=120)

    before = ask(STORING).json()["activations_meta"]
    assert before["status"] == "stored"
    fill(disk / "filler")
    answer = ask(STORING).json()
    assert answer["usage"]["completion_tokens"] > 0
    events = [line.removeprefix("data: ") for line in ask(STORING | {"stream": True}).text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    for meta in (answer["activations_meta"], json.loads(events[-2])["activations_meta"]):
        assert meta["status"] == "failed"
        assert "free space on the disk" in meta["reason"]
    refused = eventually(lambda: ask(REQUIRED), lambda seen: seen.status_code == 503)
    assert refused.json()["error"]["code"] == "store_unavailable"
    assert "free space on the disk" in refused.json()["error"]["message"]
    [run] = before["runs"]
    for point in run["points"].values():
        assert len(read_run(point["uri"], run["run_id"]).token_ids) == run["tokens"]
    (disk / "filler").unlink()
    assert ask(STORING).json()["activations_meta"]["status"] == "stored"
    eventually(lambda: ask(REQUIRED), lambda seen: seen.status_code == 200)
