"""While no replica runs, a request is refused at once instead of waiting for one."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray
from ray import serve

from deployments.messages import Job
from serve_app.errors import ApiError
from serve_app.models import GRACE_S, ServedModel

BODY = {"model": "vitrine-demo", "prompt": "Tom has", "max_tokens": 2}


def replica_actor():
    actors = ray.util.list_named_actors(all_namespaces=True)
    (name,) = [actor["name"] for actor in actors if "#ModelReplica#" in actor["name"] and "default" in actor["name"]]
    return ray.get_actor(name, namespace="serve")


def until_it_serves(served):
    """Every answer on the way there is a 503."""
    deadline = time.monotonic() + 120
    while True:
        answer = httpx.post(f"{served.base_url}/completions", json=BODY, timeout=60)
        if answer.status_code == 200 and httpx.get(f"{served.root}/health", timeout=60).status_code == 200:
            break
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "unavailable"
        assert time.monotonic() < deadline


@pytest.mark.long
def test_a_killed_replica_means_503_until_another_serves(served):
    ray.kill(replica_actor())
    until_it_serves(served)


def test_a_request_that_no_replica_takes_ends_at_the_servers_limit(served):
    async def ask():
        model = ServedModel("gone", "no.such.application", limit_s=0.5 - GRACE_S)
        with pytest.raises(ApiError) as whole:
            await model.complete(Job("whole"))
        with pytest.raises(ApiError) as streamed:
            await anext(model.stream(Job("streamed")))
        return {failed.value.status for failed in (whole, streamed)}

    assert asyncio.run(ask()) == {504}


def test_many_first_requests_at_once_are_all_served(served):
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda _: httpx.post(f"{served.base_url}/completions", json=BODY, timeout=60), range(16))
        )
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.long
def test_a_replica_that_dies_while_it_answers_means_503_or_an_error_event(served):
    endless = BODY | {"max_tokens": 4000, "ignore_eos": True}
    url = f"{served.base_url}/completions"
    replica = serve.get_deployment_handle("ModelReplica", "default")
    with (
        ThreadPoolExecutor(4) as pool,
        httpx.stream("POST", url, json=endless | {"stream": True}, timeout=120) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        whole = [pool.submit(httpx.post, url, json=endless, timeout=120) for _ in range(4)]
        while replica.statistics.remote().result()["running"] < 5:
            pass
        ray.kill(replica_actor())
        events = [line.removeprefix("data: ") for line in lines if line]
        answers = [future.result() for future in whole]
    assert json.loads(events[-1])["error"]["code"] == "unavailable"
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "unavailable"
    until_it_serves(served)
