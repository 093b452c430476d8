"""The board of clients' jobs: updates, results, and when they are dropped."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from deployments.client_code import board as board_module
from deployments.client_code.board import Board
from deployments.client_code.job import Update
from deployments.errors import RequestError


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def running() -> None:
            await test(**fixtures)

        asyncio.run(running())

    return run


@pytest.fixture
def board() -> Board:
    return Board()


@on_a_loop
async def test_a_listener_hears_what_becomes_of_its_jobs_in_order_and_of_no_others(board):
    mine, other = await board.listen(), await board.listen()
    job, unknown = await board.open(mine), await board.open(other)
    await board.post([Update(unknown, "RUNNING")], [])
    updates = [("RUNNING", ""), ("LOG", "one"), ("LOG", "two"), ("COMPLETED", "")]
    await board.post([Update(job, status, text) for status, text in updates], [])
    assert [(update.status, update.description) for update in await board.updates(mine)] == updates


@on_a_loop
async def test_nothing_follows_the_end_of_a_job_and_what_it_printed_is_not_where_it_is(board):
    job = await board.open(None)
    await board.post([Update(job, "RUNNING")], [])
    await board.post([Update(job, "LOG", "printed")], [])
    assert (await board.latest(job))[0].status == "RUNNING"
    await board.post([Update(job, "ERROR", "it failed")], [])
    await board.post([Update(job, "COMPLETED")], [b"late"])
    ended, token = await board.latest(job)
    assert (ended.description, token) == ("it failed", None)


@on_a_loop
async def test_a_result_is_given_for_its_token_alone(board):
    job, other = await board.open(None), await board.open(None)
    for name in (job, other):
        await board.post([Update(name, "COMPLETED")], [name.encode()])
    _, token = await board.latest(job)
    assert await board.result(job, token, 0, 100) == (None, len(job), job.encode())
    assert await board.result(job, token, 3, 5) == (None, len(job), job[3:5].encode())
    for name, key in ((other, token), (job, ""), ("none", token)):
        assert await board.result(name, key, 0, 100) is None


@on_a_loop
async def test_nobody_waits_for_a_job_whose_listener_left_or_that_ended(board):
    listener = await board.listen()
    streamed, polled = await board.open(listener), await board.open(None)
    assert [await board.heartbeat(streamed), await board.heartbeat(polled)] == [True, True]
    await board.leave(listener)
    await board.post([Update(polled, "COMPLETED")], [])
    assert [await board.heartbeat(job) for job in (streamed, polled, "none")] == [False] * 3


@on_a_loop
async def test_a_job_without_signs_of_life_is_given_up(board, monkeypatch):
    job = await board.open(None)
    monkeypatch.setattr(board_module, "JOB_TIMEOUT_S", -1)
    assert (await board.latest(job))[0].status == "ERROR"


@on_a_loop
async def test_what_is_old_is_forgotten_and_the_oldest_results_make_room(board, monkeypatch):
    monkeypatch.setattr(board_module, "RESULTS_BYTES", 10)
    jobs = [await board.open(None) for _ in range(3)]
    for job in jobs:
        await board.post([Update(job, "COMPLETED")], [b"12345"])
    latest = [await board.latest(job) for job in jobs]
    assert [(update.status, token is not None) for update, token in latest] == [
        ("ERROR", False),
        ("COMPLETED", True),
        ("COMPLETED", True),
    ]
    monkeypatch.setattr(board_module, "KEEP_S", -1)
    assert await board.latest(jobs[2]) is None


@on_a_loop
async def test_a_listener_stays_as_long_as_its_ingress_gives_signs_of_life(board, monkeypatch):
    listener = await board.listen()
    job = await board.open(listener)
    await board.post([Update(job, "LOG", "unheard")], [])
    await board.listens(listener)
    assert await board.heartbeat(job)
    monkeypatch.setattr(board_module, "LISTENER_TIMEOUT_S", -1)
    await board.latest(job)
    assert not await board.heartbeat(job)


@on_a_loop
async def test_there_are_only_so_many_jobs_and_listeners(board, monkeypatch):
    monkeypatch.setattr(board_module, "MOST_JOBS", 1)
    monkeypatch.setattr(board_module, "MOST_LISTENERS", 1)
    listener = await board.listen()
    await board.open(listener)
    for ask in (lambda: board.open(listener), board.listen):
        with pytest.raises(RequestError, match="try again") as refused:
            await ask()
        assert refused.value.status == 429
    for ask in (board.open, board.updates):
        with pytest.raises(RequestError, match="subscribe first"):
            await ask("nobody")


@on_a_loop
async def test_who_fills_the_room_for_results_and_jobs_loses_their_own_ended_ones_and_nobody_elses(board, monkeypatch):
    monkeypatch.setattr(board_module, "RESULTS_BYTES", 20)
    monkeypatch.setattr(board_module, "MOST_JOBS", 5)
    running = await board.open(None, "bob")
    jobs = [await board.open(None, owner) for owner in ("alice", "bob", "bob", "bob")]
    for job in jobs:
        await board.post([Update(job, "COMPLETED")], [b"1234567"])
    assert [(await board.latest(job))[1] is not None for job in jobs] == [True, False, False, True]
    await board.open(None, "bob")
    assert [await board.latest(job) is not None for job in (running, *jobs)] == [True, True, False, True, True]
