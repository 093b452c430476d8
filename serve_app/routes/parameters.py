"""Parameters shared by routes, and lists in pages."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query

from serve_app.http.paging import first_page

Id = Annotated[str, Query(max_length=256)]


PathId = Annotated[str, Path(max_length=256)]


def listed(found: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list, from up to one entry more than its limit."""
    some, has_more = first_page(found, limit)
    return {"object": "list", "data": some, "has_more": has_more}
