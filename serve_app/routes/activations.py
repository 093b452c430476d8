"""Stored activations: sessions, their runs, and their files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

import serve_app.openapi_examples as examples
from deployments.activations.facts import check_session_id
from deployments.activations.filters import Filter
from deployments.errors import RequestError
from serve_app.http.paging import Ranged, page
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend, CallerAccount, Id, Limit, PathId, listed

FINITE: dict[str, Any] = {"allow_inf_nan": False}
MOST_TAGS = 32  # in a filter: SQLite's expressions may be 1,000 deep
MOST_NAMES = 1000  # runs in one request
Names = Annotated[str, Query(max_length=1 << 16)]  # separated by commas


# Coroutines, although they await nothing: FastAPI runs plain functions on another thread.
async def _session_id(session_id: PathId) -> str:
    return _checked(session_id, "session_id")


SessionId = Annotated[str, Depends(_session_id)]


async def _filter(
    model: Annotated[Id | None, Query(description="Only runs of this model.")] = None,
    since: Annotated[float | None, Query(description="Created then or later, in Unix seconds.", **FINITE)] = None,
    until: Annotated[float | None, Query(description="Created before, in Unix seconds.", **FINITE)] = None,
    sample_id: Annotated[Id | None, Query(description="Only runs of this sample.")] = None,
    tag: Annotated[
        list[Annotated[str, Query(max_length=513)]] | None,
        Query(description="`name=value`; if repeated, all must match.", max_length=MOST_TAGS),
    ] = None,
    run: Annotated[
        list[Names] | None,
        Query(description="Only these runs: ids, repeated or separated by commas.", max_length=MOST_NAMES),
    ] = None,
) -> Filter:
    return Filter(None, model, since, until, sample_id, tag_pairs(tag or ()), runs=_apart(run, "run"))


def tag_pairs(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Tags written as `name=value`; the name ends at the first `=`. RequestError if one has no name or no `=`."""
    pairs = [text.partition("=") for text in texts]
    if (wrong := next(("".join(pair) for pair in pairs if not (pair[0] and pair[1])), None)) is not None:
        raise RequestError(f"tag {wrong[:140]!r} must be name=value", "tag")
    return tuple((name, value) for name, _, value in pairs)


Filtered = Annotated[Filter, Depends(_filter)]
Owner = Annotated[
    Id | None,
    Query(description="Whose session; for admins, where several owners have one of that name. Empty: nobody's."),
]


activations = APIRouter(prefix="/v1/activations", tags=["Activations"], responses=errors(503))


@activations.get("/sessions", responses=examples.SESSIONS)
async def sessions(
    backend: AppBackend,
    who: CallerAccount,
    filter: Filtered,
    limit: Limit = 100,
    after: Id | None = None,
) -> dict[str, Any]:
    """List stored sessions in the order of their ids: `limit` of them, after the id `after`, which may be `id@owner`.

    With filters, list sessions with a run that matches all of them; the numbers then count only matching runs.
    """
    return listed(await backend.sessions(who, limit + 1, after, filter), limit)


@activations.get("/runs", responses=examples.RUNS)
async def runs(
    backend: AppBackend,
    who: CallerAccount,
    filter: Filtered,
    session: Id | None = None,
    limit: Limit = 100,
    after: Id | None = None,
) -> dict[str, Any]:
    """List stored runs that match all filters, the oldest first: `limit` of them, after the run `after`."""
    if session is not None:
        filter = filter._replace(session=_checked(session, "session"))
    return listed(await backend.runs(who, filter, limit + 1, after), limit)


@activations.get("/session/{session_id}", responses=examples.SESSION | errors(404, 409))
async def session(
    session_id: SessionId,
    backend: AppBackend,
    who: CallerAccount,
    limit: Annotated[int, Query(ge=1, le=1000, description="Of its runs.")] = 100,
    after: Annotated[Id | None, Query(description="The id of the last run of the previous page.")] = None,
    owner: Owner = None,
) -> dict[str, Any]:
    """Show one session: its runs, the oldest first, with points and shapes, and the files of these runs."""
    return await backend.session(who, session_id, limit, after, owner)


@activations.head("/session/{session_id}/files/{name}", include_in_schema=False)
@activations.get(
    "/session/{session_id}/files/{name}",
    response_class=Response,
    responses=examples.FILE | examples.IS_ARCHIVED | errors(404, 409),
)
async def session_file(
    session_id: SessionId, name: PathId, backend: AppBackend, who: CallerAccount, asked: Ranged, owner: Owner = None
) -> Response:
    """Download bytes of one of a session's Arrow files: a run's `file`, from its `offset` on, `bytes` of them."""
    return await page(asked, backend.file(who, session_id, name, owner), examples.ARROW)


@activations.delete("/session/{session_id}", responses=examples.DELETED | examples.IS_PINNED | errors(404))
async def delete_session(
    session_id: SessionId, backend: AppBackend, who: CallerAccount, owner: Owner = None
) -> dict[str, Any]:
    """Delete a session that is not pinned; its files are gone when this answers."""
    await backend.delete_session(who, session_id, owner)
    return {"id": session_id, "object": "session", "deleted": True}


@activations.put("/session/{session_id}/pin", responses=examples.PINNED | errors(404, 409))
async def pin_session(
    session_id: SessionId, backend: AppBackend, who: CallerAccount, owner: Owner = None
) -> dict[str, Any]:
    """Pin a session, so that neither a request nor a limit of the store deletes it."""
    await backend.pin_session(who, session_id, True, owner)
    return {"id": session_id, "object": "session", "pinned": True}


@activations.delete("/session/{session_id}/pin", responses=examples.UNPINNED | errors(404, 409))
async def unpin_session(
    session_id: SessionId, backend: AppBackend, who: CallerAccount, owner: Owner = None
) -> dict[str, Any]:
    """Remove a session's pin, if it has one."""
    await backend.pin_session(who, session_id, False, owner)
    return {"id": session_id, "object": "session", "pinned": False}


def _checked(session_id: str, field: str) -> str:
    try:
        return check_session_id(session_id)
    except ValueError as error:
        raise RequestError(str(error), field) from error


def _apart(values: list[str] | None, field: str) -> tuple[str, ...] | None:
    """The names in a field that is repeated or has commas; None if the field is missing."""
    if values is None:
        return None
    parts = tuple(part for value in values for part in value.split(","))
    if not all(parts):
        raise RequestError("a name is empty: leave the field out to get all", field)
    if len(parts) > MOST_NAMES:
        raise RequestError(f"{len(parts)} names are more than the {MOST_NAMES} that one request may have", field)
    return parts
