"""Copies a server's session, or some of its runs, to a local directory. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from deployments.activations.facts import check_session_id
from deployments.activations.segments.segments import DamagedError
from deployments.activations.segments.verify import seal
from vitrine.connection.blocking import wait
from vitrine.connection.transport import MAX_OUTAGE_S, Transport, api_root
from vitrine.runs.fetching import listed, named, run_bytes
from vitrine.runs.files import Entry
from vitrine.server_error import RequestFailed

TIMEOUT_S = 330.0  # a server may be busy first
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}\.arrow")
_CHANGED = "the session changed while it was pulled, nothing of it is kept: pull it again"


class PullError(Exception):
    """What could not be fetched, and why."""


def pull(
    url: str,
    session: str,
    to: Path,
    runs: Sequence[str] = (),
    api_key: str | None = None,
    owner: str | None = None,
    progress: bool | None = None,
) -> Path:
    """Fetch a server's session into a directory of its name below `to`, as sealed Arrow files; whole or not at all.

    Args:
        url: The server's address, with or without `/v1`.
        session: The session.
        to: The directory that the session's directory is made in.
        runs: Ids of the runs to fetch; all by default.
        api_key: The API key, if the server needs one.
        owner: The session's owner, for admins.
        progress: Whether to draw a bar; by default on a terminal.

    Returns:
        The session's directory.

    Raises:
        FileExistsError: It exists already.
        PullError: The server refuses or does not answer, a run is not there or not as it was written, or the session
            changed meanwhile.
        ValueError: The session's name, the address or the key is invalid.
    """
    folder = to / check_session_id(session)
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: take another directory, or delete it first")
    to.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".pull-", dir=to) as unfinished:  # no session's name starts with "."
        (written := Path(unfinished) / session).mkdir()
        fetch(url, written, session, runs, api_key, owner, progress)
        written.rename(folder)
    return folder


def fetch(
    url: str,
    folder: Path,
    session: str | None,
    runs: Sequence[str] = (),
    api_key: str | None = None,
    owner: str | None = None,
    progress: bool | None = None,
) -> None:
    """Write runs to sealed files of the names that they have at the server. Arguments and errors are those of `pull`.

    Args:
        url: The server's address, with or without `/v1`.
        folder: The directory for the files.
        session: The session; None if `runs` may be of any.
        runs: Ids of the runs; those of the whole session by default.
        api_key: The API key, if the server needs one.
        owner: The session's owner, for admins; empty for none.
        progress: Whether to draw a bar; by default on a terminal.
    """

    async def fetched() -> None:
        server = Transport(api_root(url), api_key, TIMEOUT_S, max_outage=MAX_OUTAGE_S)
        try:
            await write(server, await chosen(server, session, runs, owner), folder, progress)
        finally:
            await server.close()

    try:
        wait(fetched())
    except RequestFailed as error:
        raise PullError(f"{error}; nothing is kept") from error


async def chosen(
    server: Transport, session: str | None, runs: Sequence[str] = (), owner: str | None = None
) -> list[Entry]:
    """All runs of a session, or those that are named; PullError if there are none, or of several owners."""
    query = {"session": session} if session else {}
    wanted = list(dict.fromkeys(runs))
    every = (await named(server, wanted, **query)).values() if wanted else [r async for r in listed(server, query)]
    entries: list[Entry] = [run for run in every if owner is None or (run.get("owner") or "") == owner]
    missing = set(wanted) - {run["run_id"] for run in entries}
    if missing or not entries:
        what = f"session {session!r}" if session and not entries else f"run {min(missing)!r}"
        raise PullError(f"there is no {what} at {server.url}")
    if len({run.get("owner") for run in entries}) > 1:
        raise PullError(f"several owners have a session {session!r}: name one")
    return entries


async def write(server: Transport, runs: Sequence[Entry], folder: Path, progress: bool | None = None) -> None:
    """Write runs to sealed files of the names that they have at the server; PullError if they are not as written."""
    quiet = None if progress is None else not progress
    total = sum(run["bytes"] for run in runs)
    with tqdm(total=total, unit="iB", unit_scale=True, unit_divisor=1024, disable=quiet) as bar:
        for name, of_file in groupby(sorted(runs, key=lambda run: (run["file"], run["offset"])), _file_of):
            its, path = list(of_file), folder / name
            with path.open("wb") as out:
                async for piece in run_bytes(server, its):
                    out.write(piece)
                    bar.update(len(piece))
            try:
                if not seal(path, {run["run_id"] for run in its}):
                    raise PullError(_CHANGED)
            except DamagedError as error:
                raise PullError(f"{error}: run `verify` there") from error


def _file_of(run: Entry) -> str:
    name: Any = run["file"]
    if not _FILE_NAME.fullmatch(str(name)):
        raise PullError(f"{name!r:.140} is no name of a file")
    return str(name)
