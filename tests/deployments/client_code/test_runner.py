"""Jobs next to a running engine: their outcome if their process, its host or their client ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nnsight
import psutil
import pytest
from nnsight import TransformersModel
from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend

from deployments.client_code import processes
from deployments.client_code.board import Board
from deployments.client_code.execution import JobModel
from deployments.client_code.job import CodeJob, Limits, ModelKey
from deployments.client_code.kernel import PR_SET_CHILD_SUBREAPER, call
from deployments.client_code.runner import CodeRunner
from deployments.demo_model import WEIGHTS
from deployments.errors import RequestError
from deployments.model.load import load
from deployments.options import Options
from tests.waiting import wait_until

LIMITS = Limits(seconds=30, memory_bytes=1 << 30, result_bytes=1 << 20, log_bytes=1 << 20, threads=1)

pytestmark = pytest.mark.slow


class Kept(Backend):
    """Keeps a block as a client would send it."""

    def __call__(self, tracer: Any) -> None:
        self.block = RequestModel.serialize(tracer)


class LocalBoard:
    """The board as its actor's handle is called."""

    def __init__(self) -> None:
        self.board = Board()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.board, name))


@pytest.fixture(scope="module")
def shared():
    return load(str(WEIGHTS), dtype="float32", device="cpu", share=True)


@pytest.fixture(scope="module")
def client(shared):
    return TransformersModel(str(WEIGHTS), task="text-generation", tokenizer=shared.tokenizer)


@pytest.fixture(scope="module")
def reading(client):
    with client.trace("Ann has", backend=(kept := Kept())):
        found = nnsight.save(client.model.layers[0].output.sum())  # noqa: F841 - comes back by its name
    return kept.block


@pytest.fixture(scope="module")
def looping(client):
    with client.trace("Ann has", backend=(kept := Kept())):
        print("begins")
        while True:
            pass
    return kept.block


@pytest.fixture(scope="module")
def board():
    return LocalBoard()


@pytest.fixture(scope="module")
def sandbox():
    return processes.sandbox(gpu=False)


@pytest.fixture(scope="module")
def runner(shared, board, sandbox, forked_hosts):
    made = CodeRunner(Options(), JobModel(shared.shared, shared.tokenizer, sandbox), board, LIMITS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deployments.turns.MOST_WITHOUT_KEYS", 2)
        yield made
    made.close()


async def sent(board: LocalBoard, block: bytes, listener: str | None = None) -> CodeJob:
    key = ModelKey(repo_id="vitrine-demo")
    return CodeJob(await board.board.open(listener), block, False, {}, key, listener is not None)


async def status(board: LocalBoard, job: CodeJob) -> str:
    update, _ = await board.board.latest(job.id)
    return update.status


async def begins(board: LocalBoard, job: CodeJob) -> None:
    def is_running() -> bool:
        latest = board.board._jobs[job.id].latest
        assert latest.status != "ERROR", latest
        return latest.status == "RUNNING"

    await wait_until(is_running)


@pytest.mark.parametrize("harm", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_host_that_was_killed_or_stands_still_is_replaced(runner, board, reading, harm):
    async def outcomes() -> list[str]:
        found = []
        for number in range(2):
            if number:
                os.kill(runner._processes._host._process.pid, harm)
            job = await sent(board, reading)
            await runner.run(job)
            found.append(await status(board, job))
        return found

    assert asyncio.run(outcomes()) == ["COMPLETED"] * 2


def test_updates_that_the_board_does_not_take_do_not_hold_the_job(runner, board, reading, monkeypatch):
    post = board.board.post

    async def taken_at_the_ends(updates, result):
        if updates[0].status == "RUNNING":
            raise TimeoutError
        await post(updates, result)

    async def outcome() -> str:
        job = await sent(board, reading)
        await runner.run(job)
        return await status(board, job)

    monkeypatch.setattr(board.board, "post", taken_at_the_ends)
    assert asyncio.run(outcome()) == "COMPLETED"


def test_a_job_whose_client_leaves_makes_room_at_once_running_or_waiting(runner, board, looping, reading):
    async def outcome() -> str:
        listener = await board.board.listen()
        jobs = [await sent(board, looping, listener) for _ in range(3)]
        running = [asyncio.ensure_future(runner.run(job)) for job in jobs]
        await begins(board, jobs[0])
        with pytest.raises(RequestError, match="2 of your jobs wait already") as refused:
            await runner.run(await sent(board, reading))
        assert refused.value.status == 429
        await board.board.leave(listener)
        await asyncio.gather(*running)
        job = await sent(board, reading)
        await runner.run(job)
        return await status(board, job)

    assert asyncio.run(outcome()) == "COMPLETED"


def test_a_job_that_is_killed_leaves_no_process_to_the_first_one(runner, board, looping, eventually):
    async def killed() -> list[int]:
        listener = await board.board.listen()
        job = await sent(board, looping, listener)
        running = asyncio.ensure_future(runner.run(job))
        await begins(board, job)
        processes = psutil.Process(runner._processes._host._process.pid).children(recursive=True)
        await board.board.leave(listener)
        await running
        return [process.pid for process in processes]

    call("prctl", PR_SET_CHILD_SUBREAPER, 1)  # processes without a parent come here, as else to process 1
    try:
        pids = asyncio.run(killed())
        eventually(lambda: not any(map(psutil.pid_exists, pids)), limit_s=5)
    finally:
        call("prctl", PR_SET_CHILD_SUBREAPER, 0)


# Last: the tests above share the runner.
def test_a_runner_that_is_closed_leaves_no_process(runner, board, looping, eventually):
    async def pids() -> list[int]:
        job = await sent(board, looping)
        running = asyncio.ensure_future(runner.run(job))
        await begins(board, job)
        host = runner._processes._host._process.pid
        children = [int(pid) for pid in Path(f"/proc/{host}/task/{host}/children").read_text().split()]
        assert children
        runner.close()
        await running
        assert await status(board, job) == "ERROR"
        return [host, *children]

    for pid in asyncio.run(pids()):  # killed, which a busy machine takes a moment for
        eventually(lambda pid=pid: has_ended(pid))


def has_ended(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
