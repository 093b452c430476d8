"""Clients that request files and do not read them cost little, and delay no other client."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import ray
import torch

from deployments.activations.actors.store import connect
from deployments.activations.facts import FileInfo, RunInfo
from deployments.activations.segments.columns import to_batch
from deployments.client_code.board import connect as board
from deployments.client_code.job import Update
from serve_app.http.paging import PAGE_BYTES

READERS = 40
MOST_BYTES = 400 << 20
ASK = "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: bytes=0-\r\n\r\n"
SESSION, POINT = "stalled", "layers.1.output"


@pytest.fixture(scope="module")
def large(served):
    """The path of a file of 80 MiB."""
    store = connect(str(served.home / "activations"))
    segment = FileInfo(SESSION, "m", None, "Qwen3ForCausalLM", {}, {POINT: POINT})
    for run in (f"r{i}" for i in range(10)):
        given = {"run_id": run, "sample_id": None, "positions": range(1024), "token_ids": range(1024)}
        batch = to_batch(segment, **given, prompt_tokens=1, points={POINT: torch.ones(1024, 2048)})
        facts = RunInfo(run, SESSION, "m", created=1.0, prompt_tokens=1, tokens=1024)
        ray.get(store.write.remote(facts, [ray.put(batch)]))
    [file] = httpx.get(f"{served.base_url}/activations/session/{SESSION}", timeout=60).json()["files"]
    yield f"/v1/activations/session/{SESSION}/files/{file['name']}"
    httpx.delete(f"{served.base_url}/activations/session/{SESSION}", timeout=60)


@pytest.fixture(scope="module")
def processes(served, large):
    """Serve's proxy, the ingress and the store, and how much memory each has before."""
    actors = {"store": connect(str(served.home / "activations"))}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        for name, part in {"proxy": "SERVE_PROXY_ACTOR", "ingress": "default#Ingress#"}.items():
            if part in actor["name"]:
                actors[name] = ray.get_actor(actor["name"], namespace="serve")
    assert len(actors) == 3
    httpx.get(f"{served.root}/health", timeout=60)
    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors.values()])
    return {psutil.Process(pid): memory(psutil.Process(pid)) for pid in pids}


@contextlib.contextmanager
def stalled(root: str, *asked: str) -> Iterator[list[socket.socket]]:
    """Clients each of whom has the beginning of an answer to read, and reads nothing; one of them asks for each."""
    at = urlsplit(root)
    with contextlib.ExitStack() as stack:
        clients = []
        for one in asked:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((at.hostname, at.port))
            client.sendall(one.encode())
            clients.append(client)
        waiting = set(clients)
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], 120)
            assert ready, "not all were answered"
            waiting -= set(ready)
        yield clients


def memory(process: psutil.Process) -> int:
    """Bytes of its own; what it shares with others is Ray's object store."""
    found = process.memory_info()
    return found.rss - found.shared


def test_forty_stalled_readers_cost_little_and_others_are_served(served, large, processes):
    with stalled(served.root, *[ASK.format(path=large) * 8] * READERS):  # each asks for eight pages at once
        for page in range(8):
            first = page * PAGE_BYTES
            asked = {"Range": f"bytes={first}-"}
            answer = httpx.get(f"{served.root}{large}", headers=asked, timeout=60)
            assert (answer.status_code, len(answer.content)) == (206, PAGE_BYTES)
            assert httpx.get(f"{served.root}/health", timeout=60).status_code == 200
            grown = {process.name(): memory(process) - before for process, before in processes.items()}
            assert all(size < MOST_BYTES for size in grown.values()), grown


@pytest.fixture(scope="module")
def result(runs_code):
    """`result(size)`: the address of a finished job's result of so many bytes."""

    def put(size: int) -> str:
        jobs = board()
        job = ray.get(jobs.open.remote(None))
        ray.get(jobs.post.remote([Update(job, "COMPLETED")], [bytes(size)]))
        _, token = ray.get(jobs.latest.remote(job))
        return f"{runs_code}/response/{job}/result?token={token}"

    return put


def test_forty_stalled_readers_of_nnsights_results_cost_little_and_give_their_places_back(served, processes, result):
    large, small = result(32 << 20), result(1 << 20)
    asked = f"GET {large.removeprefix(served.root)} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with stalled(served.root, *[asked] * READERS):
        for _ in range(10):
            assert len(httpx.get(small, timeout=60).content) == 1 << 20
            grown = {process.name(): memory(process) - before for process, before in processes.items()}
            assert all(size < MOST_BYTES for size in grown.values()), grown
    for _ in range(8):  # twice the places: whoever has read a result, or has gone, holds up nobody
        assert len(httpx.get(large, timeout=60).content) == 32 << 20
