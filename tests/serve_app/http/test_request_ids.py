"""Request ids: the client's or the server's, in the answer, in the logs and in recorded runs."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from deployments.activations import read_run
from serve_app.answers import Answer

PARTS = ("proxy", "Ingress", "ModelReplica")  # of the names of their log files
BODY = {"model": "vitrine-demo", "prompt": "Tom has", "max_tokens": 2}


def post(served, request_id: str | None = None, **fields):
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    return httpx.post(f"{served.base_url}/completions", json=BODY | fields, headers=headers, timeout=60)


def test_every_answer_has_a_request_id_of_its_own(served):
    ids = [post(served).headers["x-request-id"], httpx.get(f"{served.root}/health", timeout=60).headers["x-request-id"]]
    ids.append(httpx.get(f"{served.base_url}/nothing", timeout=60).headers["x-request-id"])
    assert len(set(ids)) == 3
    assert all(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_own_id_comes_back_once(served, stream):
    answer = post(served, "trace-1/step=2:a@b.c+d_e", stream=stream)
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == ["trace-1/step=2:a@b.c+d_e"]


@pytest.mark.parametrize("bad", ["x" * 129, "two words", "a;b", "<script>", "{}"])
def test_an_id_that_is_too_long_or_odd_is_refused(served, bad):
    answer = post(served, bad)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Id"


def test_two_requests_of_one_id_make_two_runs_that_keep_it(served):
    fields = {"store_activations": True, "session_id": "request-ids"}
    answers = [post(served, "same-for-both", **fields).json() for _ in range(2)]
    runs = [answer["activations_meta"]["runs"][0] for answer in answers]
    assert runs[0]["run_id"] != runs[1]["run_id"]
    assert answers[0]["id"] != answers[1]["id"]
    for run in runs:
        stored = read_run(run["points"]["layers.2.input_layernorm.output"]["uri"], run_id=run["run_id"])
        assert stored.facts.request_id == "same-for-both"


def test_the_logs_of_proxy_ingress_and_replica_name_it(served, eventually):
    post(served, "find-me-in-the-logs")

    def naming() -> set[str]:
        logs = served.cluster.directory.rglob("serve/*.log")
        return {path.name for path in logs if "find-me-in-the-logs" in path.read_text()}

    # The proxy writes its line after it has answered.
    eventually(naming, lambda names: all(any(part in name for name in names) for part in PARTS))


def test_a_stream_that_fails_names_the_clients_id():
    async def failing():
        raise RuntimeError("never seen before")
        yield []

    async def read():
        answer = Answer("chat", "job", "model", sequences=1, per_prompt=1)
        return [event async for event in answer.stream(failing(), [], False, "trace-1")]

    error = json.loads(asyncio.run(read())[-1].removeprefix("data: "))["error"]
    assert "trace-1" in error["message"]
