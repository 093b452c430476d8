"""While no replica runs, a request is refused at once instead of waiting for one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray

BODY = {"model": "vitrine-demo", "prompt": "Tom has", "max_tokens": 2}


def replica_actor():
    actors = ray.util.list_named_actors(all_namespaces=True)
    (name,) = [actor["name"] for actor in actors if "#ModelReplica#" in actor["name"] and "default" in actor["name"]]
    return ray.get_actor(name, namespace="serve")


@pytest.mark.long
def test_a_killed_replica_means_503_until_another_serves(served):
    ray.kill(replica_actor())
    deadline = time.monotonic() + 120
    seen = set()
    while True:
        answer = httpx.post(f"{served.base_url}/completions", json=BODY, timeout=60)
        seen.add(answer.status_code)
        if answer.status_code == 200 and httpx.get(f"{served.root}/health", timeout=60).status_code == 200:
            break
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "unavailable"
        assert time.monotonic() < deadline
    assert 200 in seen


def test_many_first_requests_at_once_are_all_served(served):
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda _: httpx.post(f"{served.base_url}/completions", json=BODY, timeout=60), range(16))
        )
    assert {answer.status_code for answer in answers} == {200}
