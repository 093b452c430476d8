"""Lists in pages of at most a few MiB each."""

from __future__ import annotations

from typing import Any

MOST_NAMED = 20_000  # points or tensors that the items of a page name together, each a few hundred bytes


def first_page(found: list[dict[str, Any]], limit: int) -> tuple[list[dict[str, Any]], bool]:
    """As many of the first `limit` items as a page holds, at least one, and whether there are more.

    Args:
        found: Items, of which one more than `limit` was looked for; `points` or `tensors` are what they name.
        limit: The most items.
    """
    named = 0
    for place, item in enumerate(found[:limit]):
        named += len(item.get("points", ())) + len(item.get("tensors", ()))
        if place and named > MOST_NAMED:
            return found[:place], True
    return found[:limit], len(found) > limit
