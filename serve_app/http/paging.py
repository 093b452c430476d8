"""Lists in pages of at most a few MiB each."""

from __future__ import annotations

from typing import Any

MOST_NAMED = 20_000  # points or tensors of all items of a page, each a few hundred bytes


def first_page(found: list[dict[str, Any]], limit: int) -> tuple[list[dict[str, Any]], bool]:
    """The first `limit` items, or as many as fit into a page but at least one, and whether there are more.

    Args:
        found: Up to `limit` + 1 items, which list `points` or `tensors`.
        limit: The most items.
    """
    named = 0
    for place, item in enumerate(found[:limit]):
        named += len(item.get("points", ())) + len(item.get("tensors", ()))
        if place and named > MOST_NAMED:
            return found[:place], True
    return found[:limit], len(found) > limit
