"""Lists of stored runs, and the bytes of runs, from a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from vitrine.connection.transport import Transport, together
from vitrine.runs.files import Entry, head_length, spans
from vitrine.server_error import ServerError

COLLECTED = "collected"  # the tag with a name of what was collected, by which it is stored once
HEAD_BYTES = 1 << 16  # of a file's beginning; nearly always enough for its head
NAMED = 64  # runs that one request names


async def run_bytes(server: Transport, runs: Sequence[Entry]) -> AsyncIterator[bytes]:
    """Fetch listed runs of one file as a file without a footer: its head, and the runs in the order in which they lie.

    Raises:
        RequestFailed: The server rejects a request, or does not answer.
        ValueError: The file is not one of activations.
    """
    path = f"/activations/session/{runs[0]['session_id']}/files/{runs[0]['file']}"
    query = {"owner": runs[0]["owner"] or ""} if "owner" in runs[0] else {}
    last = max(run["offset"] + run["bytes"] for run in runs)
    beginning, length = b"", None
    try:
        while length is None:
            if len(beginning) == last:
                raise ValueError("it ends before the runs")
            end = min(last, 8 * len(beginning) or HEAD_BYTES)
            beginning += b"".join([page async for page in server.file_bytes(path, len(beginning), end, query)])
            length = head_length(beginning)
    except ValueError as error:
        raise ValueError(f"{path} is not a file of activations: {error}") from error
    yield beginning[:length]
    for first, end in spans(length, runs):
        yield (known := beginning[first:end])
        async for page in server.file_bytes(path, first + len(known), end, query):
            yield page


async def listed(server: Transport, query: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The runs that a server lists for a query, the oldest first.

    Raises:
        RequestFailed: The server rejects a request, or does not answer.
    """
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        page = await server.get("/activations/runs", {**query, "limit": 1000})
        try:
            for run in page["data"]:
                yield run
                query = {**query, "after": run["run_id"]}
        except (TypeError, KeyError) as error:
            raise ServerError("/activations/runs does not list runs", 200) from error


async def collected(server: Transport, session: str, names: Sequence[str]) -> dict[str, str]:
    """The ids of a session's stored runs by the names that their tag `COLLECTED` has. Raises as `listed`."""

    async def found(name: str) -> list[dict[str, Any]]:
        query = {"session": session, "tag": f"{COLLECTED}={name}", "limit": 1}
        return list((await server.get("/activations/runs", query))["data"])

    runs = await together(map(found, names))
    return {name: run["run_id"] for name, some in zip(names, runs, strict=True) for run in some}


async def named(server: Transport, run_ids: Sequence[str], **query: Any) -> dict[str, dict[str, Any]]:
    """The server's entries of some runs, by their ids, without those that it does not have. Raises as `listed`."""

    async def some(ids: Sequence[str]) -> list[dict[str, Any]]:
        return [run async for run in listed(server, {**query, "run": ",".join(ids)})]

    groups = [run_ids[first : first + NAMED] for first in range(0, len(run_ids), NAMED)]
    return {run["run_id"]: run for part in await together(map(some, groups)) for run in part}
