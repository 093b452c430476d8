"""Requests that record while the store's disk is full, or its directory is away."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from deployments.activations import read_run

BODY = {"model": "vitrine-demo", "prompt": "Tom has 3.", "max_tokens": 4, "temperature": 0, "store_activations": True}


@pytest.mark.long
def test_over_http_a_full_disk_fails_what_is_recorded_and_no_answer(with_mounts):
    with_mounts(Path(__file__).with_name("full_disk.py"))


@pytest.fixture
def away(served):
    """The store's directory has another name while a test runs, until it is called."""
    root = served.home / "activations"
    elsewhere = root.with_name("elsewhere")
    root.rename(elsewhere)

    def back():
        if elsewhere.exists():
            elsewhere.rename(root)

    yield back
    back()


def test_while_the_stores_directory_is_away_answers_come_and_say_so(served, away, eventually):
    def ask(**fields):
        return httpx.post(f"{served.base_url}/completions", json=BODY | {"session_id": "away"} | fields, timeout=120)

    required = {"capture": {"points": ["norm.output"], "required": True}}
    events = [line.removeprefix("data: ") for line in ask(stream=True).text.split("\n\n") if line]
    answer = ask().json()
    assert answer["usage"]["completion_tokens"] > 0
    for meta in (answer["activations_meta"], json.loads(events[-2])["activations_meta"]):
        assert meta["status"] == "failed"
        assert "put the directory back" in meta["reason"]
    refused = ask(**required)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "store_unavailable"
    assert "put the directory back" in refused.json()["error"]["message"]
    away()
    meta = ask().json()["activations_meta"]
    assert meta["status"] == "stored"
    [run] = meta["runs"]
    assert (
        len(read_run(run["points"]["layers.2.input_layernorm.output"]["uri"], run["run_id"]).token_ids) == run["tokens"]
    )
    eventually(lambda: ask(**required), lambda seen: seen.status_code == 200)
