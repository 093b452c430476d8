"""Parameters and dependencies that routes share, and lists in pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request
from fastapi.dependencies.models import Dependant
from starlette.requests import HTTPConnection

from deployments.accounts import Account, Exactly
from deployments.errors import RequestError, nearest
from serve_app.backend.backend import Backend
from serve_app.http.guard import Sender
from serve_app.http.paging import first_page

MOST_NAME = 128  # characters of a name that a message quotes
Id = Annotated[str, Query(max_length=256)]
PathId = Annotated[str, Path(max_length=256)]
Limit = Annotated[int, Query(ge=1, le=1000)]


# A coroutine, although it awaits nothing: FastAPI runs plain functions on another thread.
async def _backend(connection: HTTPConnection) -> Backend:
    backend: Backend = connection.app.state.backend
    return backend


async def _account(sender: Sender, backend: AppBackend) -> Account:
    return Account(sender.owner, sender.is_admin)


async def _of_owner(
    who: CallerAccount,
    owner: Annotated[
        str | None, Query(max_length=256, description="For admins: another owner, empty for none.")
    ] = None,
) -> Account:
    """The account whose names a request uses; that of nobody if it may not use the owner's."""
    if owner is None:
        return who
    return Exactly(owner or None if who.may_change(owner or None) else "")


AppBackend = Annotated[Backend, Depends(_backend)]
CallerAccount = Annotated[Account, Depends(_account)]
OwnersAccount = Annotated[Account, Depends(_of_owner)]


async def known_query(request: Request) -> None:
    """Reject a request with a query parameter that its route does not have.

    Raises:
        RequestError: It has one. If misspelt filters were ignored, a list would hold everything.
    """
    if request.query_params:
        known = sorted(_query_names(request.scope["route"].dependant))
        for name in request.query_params:
            if name not in known:
                message = f"unknown query parameter {name[:MOST_NAME]!r}{nearest(name, known)}"
                has = f"; this route has {', '.join(known)}" if known else "; this route has none"
                raise RequestError(message + has, name[:MOST_NAME], "unknown_field")


def _query_names(dependant: Dependant) -> Iterator[str]:
    """The query parameters of a route and of all its dependencies."""
    yield from (field.alias for field in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_names(inner)


def listed(items: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list, from up to one entry more than its limit."""
    data, has_more = first_page(items, limit)
    return {"object": "list", "data": data, "has_more": has_more}
