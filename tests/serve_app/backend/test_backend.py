"""While no replica runs, a request is rejected at once instead of waiting for one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from deployments.accounts import OPERATOR
from deployments.activations import runs
from deployments.activations.actors.reader import connect_reader
from deployments.activations.actors.store import connect
from deployments.activations.filters import Filter
from deployments.job import Job
from deployments.options import NO_MODEL, Options
from serve_app.backend import client_data, served_model
from serve_app.backend.backend import Backend
from serve_app.backend.served_model import GRACE_S, ServedModel
from serve_app.http.errors import ApiError

BODY = {"model": "vitrine-demo", "prompt": "Tom has", "max_tokens": 2}


def replica_actor():
    actors = ray.util.list_named_actors(all_namespaces=True)
    (name,) = [actor["name"] for actor in actors if "#ModelReplica#" in actor["name"] and "default" in actor["name"]]
    return ray.get_actor(name, namespace="serve")


@contextmanager
def stopped(actor: Any) -> Iterator[None]:
    """An actor that answers nothing while the block runs, and everything then."""
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def until_it_serves(served, eventually):
    """Waits for an answer; each on the way there is a 503."""

    def serves() -> bool:
        answer = httpx.post(f"{served.base_url}/completions", json=BODY, timeout=60)
        if answer.status_code == 200 and httpx.get(f"{served.root}/health", timeout=60).status_code == 200:
            return True
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "unavailable"
        return False

    return lambda: eventually(serves, limit_s=120)


@pytest.mark.long
def test_a_killed_replica_means_503_until_another_serves(served, until_it_serves):
    ray.kill(replica_actor())
    until_it_serves()


def test_a_request_that_no_replica_takes_ends_at_the_servers_limit(served):
    async def unchanged(job: Job) -> Job:
        return job

    async def ask():
        model = ServedModel("gone", "no.such.application", limit_s=0.5 - GRACE_S)
        with pytest.raises(ApiError) as whole:
            await model.complete(Job("whole"), unchanged)
        with pytest.raises(ApiError) as streamed:
            await anext(model.stream(Job("streamed"), unchanged))
        return {(failed.value.status, failed.value.code) for failed in (whole, streamed)}

    assert asyncio.run(ask()) == {(504, "unavailable")}


def test_what_a_model_is_is_waited_for_no_longer_than_for_a_list(served, monkeypatch):
    monkeypatch.setattr(served_model, "DESCRIBE_S", 0.5)

    async def ask(question: str) -> int:
        with pytest.raises(ApiError) as failed:
            await getattr(ServedModel("gone", "no.such.application", limit_s=600), question)()
        return failed.value.status

    assert [asyncio.run(ask(question)) for question in ("describe", "settings")] == [504, 504]


def test_while_serves_controller_does_not_answer_it_is_said_and_requests_are_served(served, eventually):
    def status(path: str) -> tuple[int, str | None]:
        answer = httpx.get(served.root + path, timeout=60)
        error = answer.json().get("error", {})
        assert answer.status_code != 503 or answer.headers["retry-after"]
        return answer.status_code, error.get("code")

    paths = ("/health", "/v1/models", "/v1/models/unknown")
    with ThreadPoolExecutor(3) as pool, stopped(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")):
        assert list(pool.map(status, paths)) == [(503, "unavailable")] * 3
        assert httpx.post(f"{served.base_url}/completions", json=BODY, timeout=60).status_code == 200
    eventually(lambda: status("/health"), lambda seen: seen[0] == 200)


@pytest.fixture(scope="module")
def empty_store(served, tmp_path_factory):
    """A store and its reader, which nobody else uses."""
    root = str(tmp_path_factory.mktemp("store"))
    actors = connect(root), connect_reader(root)
    yield actors
    for actor in actors:
        ray.kill(actor)


def test_a_store_that_does_not_answer_means_503(empty_store, monkeypatch):
    monkeypatch.setattr(client_data, "STORE_S", 0.5)
    store, reader = empty_store

    async def ask() -> list[tuple[int, str | None]]:
        asked = Backend(Options(model=NO_MODEL), "none", store, reader)
        sessions = (asked.sessions(OPERATOR, 1, None, Filter()), asked.session(OPERATOR, "any"))
        sessions += (asked.delete_session(OPERATOR, "any"),)
        tensors = (asked.tensors.list(OPERATOR, 1, None), asked.tensors.file(OPERATOR, "any")(0, 1))
        tensors += (asked.tensors.delete(OPERATOR, "any"),)
        answers = await asyncio.gather(*sessions, *tensors, return_exceptions=True)
        return [(answer.status, answer.code) for answer in answers if isinstance(answer, ApiError)]

    there = [(404, "session_not_found")] * 2 + [(404, "tensor_not_found")] * 2
    ray.get(store.ready.remote())  # once it has started
    with stopped(store):  # the reader needs only its index
        assert asyncio.run(ask()) == there[:1] + [(503, "unavailable")] * 4
    monkeypatch.undo()  # it may take longer to go on
    assert asyncio.run(ask()) == there


def test_many_first_requests_at_once_are_all_served(served):
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda _: httpx.post(f"{served.base_url}/completions", json=BODY, timeout=60), range(16))
        )
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.long
def test_what_a_dying_replica_had_not_begun_to_answer_another_one_does(served, until_it_serves):
    endless = BODY | {"max_tokens": 1500, "ignore_eos": True}
    url = f"{served.base_url}/completions"
    replica = serve.get_deployment_handle("ModelReplica", "default")
    with (
        ThreadPoolExecutor(4) as pool,
        httpx.stream("POST", url, json=endless | {"stream": True}, timeout=120) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        whole = [pool.submit(httpx.post, url, json=endless, timeout=120) for _ in range(2)]
        records = endless | {"session_id": "begun-twice", "capture": {"points": ["norm.output"]}}
        whole += [pool.submit(httpx.post, url, json=records, timeout=120) for _ in range(2)]
        while replica.statistics.remote().result()["running"] < 5:
            pass
        ray.kill(replica_actor())
        events = [line.removeprefix("data: ") for line in lines if line]
        answers = [future.result() for future in whole]
    assert json.loads(events[-1])["error"]["code"] == "unavailable"
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 1500
    reports = [answer.json()["activations_meta"]["runs"][0] for answer in answers[2:]]
    assert [report["status"] for report in reports] == ["stored", "stored"]
    names = sorted(report["run_id"] for report in reports)
    session = httpx.get(f"{served.base_url}/activations/session/begun-twice", timeout=60).json()
    assert sorted(run["run_id"] for run in session["runs"]) == names
    assert sorted(run.run_id for run in runs(served.home / "activations" / "_" / "begun-twice")) == names
    until_it_serves()
