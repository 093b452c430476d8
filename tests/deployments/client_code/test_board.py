"""The board of clients' jobs: updates, results, and when they are dropped."""

from __future__ import annotations

import asyncio

import pytest

from deployments.accounts import Account
from deployments.client_code import board as board_module
from deployments.client_code.board import Board
from deployments.client_code.job import Update
from deployments.errors import RequestError


def test_a_listener_hears_what_becomes_of_its_jobs_in_order_and_of_no_others():
    async def received() -> list[str]:
        board = Board()
        mine, other = await board.listen(), await board.listen()
        job, unknown = await board.open(mine), await board.open(other)
        await board.post([Update(unknown, "RUNNING")], [])
        updates = ("RUNNING", ""), ("LOG", "one"), ("LOG", "two"), ("COMPLETED", "")
        await board.post([Update(job, status, text) for status, text in updates], [])
        return [f"{update.status} {update.description}".strip() for update in await board.updates(mine)]

    assert asyncio.run(received()) == ["RUNNING", "LOG one", "LOG two", "COMPLETED"]


def test_a_waiting_listener_is_woken():
    async def received() -> list[Update]:
        board = Board()
        listener = await board.listen()
        job = await board.open(listener)
        waiting = asyncio.ensure_future(board.updates(listener))
        await asyncio.sleep(0)
        assert not waiting.done()
        await board.post([Update(job, "RUNNING")], [])
        return await waiting

    assert [update.status for update in asyncio.run(received())] == ["RUNNING"]


def test_nothing_follows_the_end_of_a_job_and_what_it_printed_is_not_where_it_is():
    async def latest() -> tuple[str, str]:
        board = Board()
        job = await board.open(None)
        await board.post([Update(job, "RUNNING")], [])
        await board.post([Update(job, "LOG", "printed")], [])
        running, _ = await board.latest(job)
        await board.post([Update(job, "ERROR", "it failed")], [])
        await board.post([Update(job, "COMPLETED")], [b"late"])
        ended, token = await board.latest(job)
        assert token is None
        return running.status, ended.description

    assert asyncio.run(latest()) == ("RUNNING", "it failed")


def test_a_result_is_given_for_its_token_alone():
    async def given() -> list[object]:
        board = Board()
        job, other = await board.open(None), await board.open(None)
        for name in (job, other):
            await board.post([Update(name, "COMPLETED")], [name.encode()])
        _, token = await board.latest(job)
        assert await board.result(job, token, 0, 100) == (None, len(job), job.encode())
        assert await board.result(job, token, 3, 5) == (None, len(job), job[3:5].encode())
        asked = ((other, token), (job, ""), ("none", token))
        return [await board.result(name, key, 0, 100) for name, key in asked]

    assert asyncio.run(given()) == [None, None, None]


def test_nobody_waits_for_a_job_whose_listener_left_or_that_ended():
    async def waited_for() -> list[bool]:
        board = Board()
        listener = await board.listen()
        streamed, polled = await board.open(listener), await board.open(None)
        before = [await board.heartbeat(streamed), await board.heartbeat(polled)]
        await board.leave(listener)
        await board.post([Update(polled, "COMPLETED")], [])
        return [*before, await board.heartbeat(streamed), await board.heartbeat(polled), await board.heartbeat("none")]

    assert asyncio.run(waited_for()) == [True, True, False, False, False]


def test_a_job_without_signs_of_life_is_given_up(monkeypatch):
    async def latest() -> Update:
        board = Board()
        job = await board.open(None)
        monkeypatch.setattr(board_module, "JOB_TIMEOUT_S", -1)
        found, _ = await board.latest(job)
        return found

    assert asyncio.run(latest()).status == "ERROR"


def test_what_is_old_is_forgotten_and_the_oldest_results_make_room(monkeypatch):
    monkeypatch.setattr(board_module, "RESULTS_BYTES", 10)

    async def kept() -> list[bool]:
        board = Board()
        jobs = [await board.open(None) for _ in range(3)]
        for job in jobs:
            await board.post([Update(job, "COMPLETED")], [b"12345"])
        latest = [await board.latest(job) for job in jobs]
        assert [update.status for update, _ in latest] == ["ERROR", "COMPLETED", "COMPLETED"]
        monkeypatch.setattr(board_module, "KEEP_S", -1)
        assert await board.latest(jobs[2]) is None
        return [token is not None for _, token in latest]

    assert asyncio.run(kept()) == [False, True, True]


def test_jobs_that_have_ended_make_room_for_new_ones(monkeypatch):
    monkeypatch.setattr(board_module, "MOST_JOBS", 2)

    async def known_ones() -> list[bool]:
        board = Board()
        first, second = await board.open(None), await board.open(None)
        await board.post([Update(second, "COMPLETED")], [])
        third = await board.open(None)
        return [await board.latest(job) is not None for job in (first, second, third)]

    assert asyncio.run(known_ones()) == [True, False, True]


def test_a_listener_stays_as_long_as_its_ingress_gives_signs_of_life(monkeypatch):
    async def waits() -> list[bool]:
        board = Board()
        listener = await board.listen()
        job = await board.open(listener)
        await board.post([Update(job, "LOG", "unheard")], [])
        await board.listens(listener)
        before = await board.heartbeat(job)
        monkeypatch.setattr(board_module, "LISTENER_TIMEOUT_S", -1)
        await board.latest(job)
        return [before, await board.heartbeat(job)]

    assert asyncio.run(waits()) == [True, False]


def test_there_are_only_so_many_jobs_and_listeners(monkeypatch):
    monkeypatch.setattr(board_module, "MOST_JOBS", 1)
    monkeypatch.setattr(board_module, "MOST_LISTENERS", 1)

    async def full() -> None:
        board = Board()
        listener = await board.listen()
        await board.open(listener)
        with pytest.raises(RequestError, match="try again") as refused:
            await board.open(listener)
        assert refused.value.status == 429
        with pytest.raises(RequestError, match="try again"):
            await board.listen()
        with pytest.raises(RequestError, match="subscribe first"):
            await board.open("nobody")
        with pytest.raises(RequestError, match="subscribe first"):
            await board.updates("nobody")

    asyncio.run(full())


def test_a_job_and_a_listener_of_another_key_are_as_if_there_were_none():
    async def scene():
        board = Board()
        mine, theirs = await board.listen("alice"), await board.listen("bob")
        job = await board.open(mine, "alice")
        with pytest.raises(RequestError, match="subscribe first"):
            await board.open(mine, "bob")
        assert await board.open(theirs, "bob")
        assert await board.latest(job, Account("bob", is_admin=False)) is None
        assert await board.latest(job, Account("alice", is_admin=False))
        assert await board.latest(job, Account("root"))

    asyncio.run(scene())


def test_who_fills_the_room_for_results_and_jobs_loses_their_own_and_nobody_elses(monkeypatch):
    monkeypatch.setattr(board_module, "RESULTS_BYTES", 20)
    monkeypatch.setattr(board_module, "MOST_JOBS", 4)

    async def kept() -> tuple[list[bool], list[bool]]:
        board = Board()
        jobs = [await board.open(None, owner) for owner in ("alice", "bob", "bob", "bob")]
        for job in jobs:
            await board.post([Update(job, "COMPLETED")], [b"1234567"])
        with_results = [(await board.latest(job))[1] is not None for job in jobs]
        await board.open(None, "bob")
        return with_results, [await board.latest(job) is not None for job in jobs]

    assert asyncio.run(kept()) == ([True, False, False, True], [True, False, True, True])
