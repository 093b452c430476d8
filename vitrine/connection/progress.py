"""Concurrent requests of one call: results in order, and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from vitrine.connection.transport import together

_T = TypeVar("_T")


async def gathered(
    calls: Sequence[tuple[int, Awaitable[_T]]], unit: str = "prompt", progress: bool | None = None
) -> list[_T]:
    """Await requests and return their results in order; the first failure cancels the others.

    Args:
        calls: The requests, each with its number of units.
        unit: The unit that the bar counts.
        progress: Whether to show a bar; by default in terminals and notebooks, for several requests.
    """
    with _bar(sum(count for count, _ in calls), unit, progress, len(calls) > 1) as bar:

        async def one(count: int, call: Awaitable[_T]) -> _T:
            found = await call
            bar.update(count)
            return found

        return await together(one(count, call) for count, call in calls)


def _bar(total: int, unit: str, progress: bool | None, is_long: bool) -> Any:
    from tqdm import tqdm

    is_seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(total=total, unit=unit, disable=not (is_long and is_seen if progress is None else progress))
