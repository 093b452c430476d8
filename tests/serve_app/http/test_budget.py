"""The memory of answers being sent is bounded; waiting answers go on when there is room."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.http.paging import Budget


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_who_would_hold_too_much_waits_until_others_are_done_or_cancelled():
    async def steps() -> None:
        budget, inside = Budget(100), list[str]()

        async def hold(name: str, size: int) -> None:
            async with budget.hold(size):
                inside.append(name)
                try:
                    await asyncio.Event().wait()
                finally:
                    inside.remove(name)

        tasks = {name: asyncio.ensure_future(hold(name, size)) for name, size in (("a", 60), ("b", 40), ("c", 300))}
        await settled()
        assert inside == ["a", "b"]
        small = asyncio.ensure_future(hold("none", 0))
        await settled()
        assert inside == ["a", "b", "none"]
        tasks["a"].cancel()
        await settled()
        assert inside == ["b", "none"]
        tasks["b"].cancel()
        await settled()
        assert inside == ["none", "c"]  # alone also one that is larger
        for task in (small, tasks["c"]):
            task.cancel()
        await settled()
        assert not inside
        async with asyncio.timeout(10), budget.hold(100):
            pass

    asyncio.run(steps())


def test_a_failure_gives_back_what_it_held():
    async def steps() -> None:
        budget = Budget(1)
        with pytest.raises(OSError, match="broken"):
            async with budget.hold(1):
                raise OSError("broken")
        async with asyncio.timeout(10), budget.hold(1):
            pass

    asyncio.run(steps())
