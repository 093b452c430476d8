"""What the board knows of clients' jobs, and what it forgets."""

from __future__ import annotations

import asyncio

import pytest

from deployments.activations.facts import Account
from deployments.client_code import board
from deployments.client_code.board import Board
from deployments.client_code.job import Update
from deployments.errors import RequestError


def test_a_listener_hears_what_becomes_of_its_jobs_in_order_and_of_no_others():
    async def told() -> list[str]:
        known = Board()
        mine, other = await known.listen(), await known.listen()
        job, stranger = await known.open(mine), await known.open(other)
        await known.tell([Update(stranger, "RUNNING")], [])
        said = ("RUNNING", ""), ("LOG", "one"), ("LOG", "two"), ("COMPLETED", "")
        await known.tell([Update(job, status, text) for status, text in said], [])
        return [f"{update.status} {update.description}".strip() for update in await known.updates(mine)]

    assert asyncio.run(told()) == ["RUNNING", "LOG one", "LOG two", "COMPLETED"]


def test_a_waiting_listener_is_woken():
    async def told() -> list[Update]:
        known = Board()
        listener = await known.listen()
        job = await known.open(listener)
        waiting = asyncio.ensure_future(known.updates(listener))
        await asyncio.sleep(0)
        assert not waiting.done()
        await known.tell([Update(job, "RUNNING")], [])
        return await waiting

    assert [update.status for update in asyncio.run(told())] == ["RUNNING"]


def test_nothing_follows_the_end_of_a_job_and_what_it_printed_is_not_where_it_is():
    async def latest() -> tuple[str, str]:
        known = Board()
        job = await known.open(None)
        await known.tell([Update(job, "RUNNING")], [])
        await known.tell([Update(job, "LOG", "printed")], [])
        running, _ = await known.latest(job)
        await known.tell([Update(job, "ERROR", "it failed")], [])
        await known.tell([Update(job, "COMPLETED")], [b"late"])
        ended, token = await known.latest(job)
        assert token is None
        return running.status, ended.description

    assert asyncio.run(latest()) == ("RUNNING", "it failed")


def test_a_result_is_given_for_its_token_alone():
    async def given() -> list[object]:
        known = Board()
        job, other = await known.open(None), await known.open(None)
        for name in (job, other):
            await known.tell([Update(name, "COMPLETED")], [name.encode()])
        _, token = await known.latest(job)
        assert await known.result(job, token, 0, 100) == (None, len(job), job.encode())
        assert await known.result(job, token, 3, 5) == (None, len(job), job[3:5].encode())
        asked = ((other, token), (job, ""), ("none", token))
        return [await known.result(name, key, 0, 100) for name, key in asked]

    assert asyncio.run(given()) == [None, None, None]


def test_nobody_waits_for_a_job_whose_listener_left_or_that_ended():
    async def heard() -> list[bool]:
        known = Board()
        listener = await known.listen()
        streamed, polled = await known.open(listener), await known.open(None)
        before = [await known.heard(streamed), await known.heard(polled)]
        await known.leave(listener)
        await known.tell([Update(polled, "COMPLETED")], [])
        return [*before, await known.heard(streamed), await known.heard(polled), await known.heard("none")]

    assert asyncio.run(heard()) == [True, True, False, False, False]


def test_a_job_without_signs_of_life_is_given_up(monkeypatch):
    async def latest() -> Update:
        known = Board()
        job = await known.open(None)
        monkeypatch.setattr(board, "JOB_TIMEOUT_S", -1)
        found, _ = await known.latest(job)
        return found

    assert asyncio.run(latest()).status == "ERROR"


def test_what_is_old_is_forgotten_and_the_oldest_results_make_room(monkeypatch):
    monkeypatch.setattr(board, "RESULTS_BYTES", 10)

    async def kept() -> list[bool]:
        known = Board()
        jobs = [await known.open(None) for _ in range(3)]
        for job in jobs:
            await known.tell([Update(job, "COMPLETED")], [b"12345"])
        told = [await known.latest(job) for job in jobs]
        assert [update.status for update, _ in told] == ["ERROR", "COMPLETED", "COMPLETED"]
        monkeypatch.setattr(board, "KEEP_S", -1)
        assert await known.latest(jobs[2]) is None
        return [token is not None for _, token in told]

    assert asyncio.run(kept()) == [False, True, True]


def test_jobs_that_have_ended_make_room_for_new_ones(monkeypatch):
    monkeypatch.setattr(board, "MOST_JOBS", 2)

    async def known_ones() -> list[bool]:
        known = Board()
        first, second = await known.open(None), await known.open(None)
        await known.tell([Update(second, "COMPLETED")], [])
        third = await known.open(None)
        return [await known.latest(job) is not None for job in (first, second, third)]

    assert asyncio.run(known_ones()) == [True, False, True]


def test_a_listener_stays_as_long_as_its_ingress_gives_signs_of_life(monkeypatch):
    async def waits() -> list[bool]:
        known = Board()
        listener = await known.listen()
        job = await known.open(listener)
        await known.tell([Update(job, "LOG", "unheard")], [])
        await known.listens(listener)
        before = await known.heard(job)
        monkeypatch.setattr(board, "LISTENER_TIMEOUT_S", -1)
        await known.latest(job)
        return [before, await known.heard(job)]

    assert asyncio.run(waits()) == [True, False]


def test_there_are_only_so_many_jobs_and_listeners(monkeypatch):
    monkeypatch.setattr(board, "MOST_JOBS", 1)
    monkeypatch.setattr(board, "MOST_LISTENERS", 1)

    async def full() -> None:
        known = Board()
        listener = await known.listen()
        await known.open(listener)
        with pytest.raises(RequestError, match="try again") as refused:
            await known.open(listener)
        assert refused.value.status == 429
        with pytest.raises(RequestError, match="try again"):
            await known.listen()
        with pytest.raises(RequestError, match="subscribe first"):
            await known.open("nobody")
        with pytest.raises(RequestError, match="subscribe first"):
            await known.updates("nobody")

    asyncio.run(full())


def test_a_job_and_a_listener_of_another_key_are_as_if_there_were_none():
    async def scene():
        known = Board()
        mine, theirs = await known.listen("alice"), await known.listen("bob")
        job = await known.open(mine, "alice")
        with pytest.raises(RequestError, match="subscribe first"):
            await known.open(mine, "bob")
        assert await known.open(theirs, "bob")
        assert await known.latest(job, Account("bob", is_admin=False)) is None
        assert await known.latest(job, Account("alice", is_admin=False))
        assert await known.latest(job, Account("root"))

    asyncio.run(scene())


def test_who_fills_the_room_for_results_and_jobs_loses_their_own_and_nobody_elses(monkeypatch):
    monkeypatch.setattr(board, "RESULTS_BYTES", 20)
    monkeypatch.setattr(board, "MOST_JOBS", 4)

    async def kept() -> tuple[list[bool], list[bool]]:
        known = Board()
        jobs = [await known.open(None, owner) for owner in ("alice", "bob", "bob", "bob")]
        for job in jobs:
            await known.tell([Update(job, "COMPLETED")], [b"1234567"])
        with_results = [(await known.latest(job))[1] is not None for job in jobs]
        await known.open(None, "bob")
        return with_results, [await known.latest(job) is not None for job in jobs]

    assert asyncio.run(kept()) == ([True, False, False, True], [True, False, True, True])
