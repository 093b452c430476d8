"""Owners take turns, and none has many requests that wait."""

from __future__ import annotations

import asyncio

import pytest

from deployments.errors import RequestError
from deployments.turns import Turns


def test_owners_take_turns_however_many_requests_each_has_and_who_leaves_takes_none() -> None:
    turns, order = Turns("jobs", 8), list[str]()

    async def ask(owner: str) -> None:
        with turns.place(owner):
            async with turns.turn(owner):
                order.append(owner)
                await asyncio.sleep(0)

    async def all_of_them() -> None:
        tasks = [asyncio.ensure_future(ask(owner)) for owner in ("ann", "ann", "ann", "bob", "bob", "eve")]
        await asyncio.sleep(0)
        tasks[-2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await ask("late")  # the lock is free again

    asyncio.run(all_of_them())
    assert order == ["ann", "ann", "bob", "eve", "ann", "late"]


def test_an_owner_may_have_few_waiting_and_others_still_have_theirs() -> None:
    turns = Turns("attributions", 1)
    with turns.place("ann"), turns.place("ann"):
        with pytest.raises(RequestError, match="1 of your attributions wait") as refused, turns.place("ann"):
            pass
        assert refused.value.status == 429
        with turns.place("bob"):
            pass
    with turns.place("ann"):
        pass
