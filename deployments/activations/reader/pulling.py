"""Copies a server's session, or some of its runs, to a local directory. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from tqdm import tqdm

from deployments.activations.facts import check_session_id
from deployments.activations.filters import MOST_BYTES
from deployments.activations.segments.batches import DamagedError
from deployments.activations.segments.verify import seal
from deployments.options import fits_header
from deployments.run_files import head_length, spans

_TIMEOUT = httpx.Timeout(30, read=330)  # a server may be busy first
_HEAD = 64 << 10  # bytes of a file in which its head nearly always is
_RUNS = 100  # that one request names
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}\.arrow")
_CHANGED = "the session changed while it was pulled, nothing of it is kept: pull it again"

Listed = Mapping[str, Any]  # a run as a server lists it


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

    `url` is the server's address, with or without `/v1`. `runs` names some runs, by default all. `owner` says whose
    session, for admins. `progress` draws a bar, by default on a terminal. Returns the session's directory.

    FileExistsError if it is there already. PullError if the server refuses, cannot be reached, or an answer is cut off,
    a run is not there or not as it was written, or the session changed meanwhile. ValueError if the name, the address
    or the key can be none.
    """
    folder = to / check_session_id(session)
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: take another directory, or delete it first")
    to.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".pull-", dir=to) as unfinished:  # no session's name starts with "."
        (written := Path(unfinished) / session).mkdir()
        with connect(url, api_key) as http:
            fetch(http, listed(http, session, runs, owner), written, progress)
        written.rename(folder)
    return folder


def connect(url: str, api_key: str | None = None) -> httpx.Client:
    """A client of a server's stored runs; ValueError if the address or the key can be none."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not a server's address: it must begin with http:// or https://")
    if api_key is not None and not fits_header(api_key):
        raise ValueError("the API key has characters other than printable ASCII")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = f"{url.rstrip('/').removesuffix('/v1')}/v1/activations"
    return httpx.Client(base_url=base, headers=headers, timeout=_TIMEOUT)


def listed(http: httpx.Client, session: str | None, runs: Sequence[str] = (), owner: str | None = None) -> list[Listed]:
    """All runs of a session, or those that are named; `owner`, empty for none, is for admins."""
    found, wanted = list[Listed](), list(dict.fromkeys(runs))
    for some in [wanted[first : first + _RUNS] for first in range(0, len(wanted), _RUNS)] or [[]]:
        params = {"limit": 1000, "run": some} | ({"session": session} if session else {})
        page: dict[str, Any] = {"has_more": True}
        while page["has_more"]:
            page = _get(http, "/runs", params).json()
            found += [run for run in page["data"] if owner is None or (run.get("owner") or "") == owner]
            if page["has_more"]:
                params["after"] = page["data"][-1]["run_id"]
    missing = set(wanted) - {run["run_id"] for run in found}
    if missing or not found:
        what = f"session {session!r}" if session and not found else f"run {min(missing)!r}"
        raise PullError(f"there is no {what} at {http.base_url}")
    if len({run.get("owner") for run in found}) > 1:
        raise PullError(f"several owners have a session {session!r}: name one")
    return found


def fetch(http: httpx.Client, runs: Sequence[Listed], folder: Path, progress: bool | None = None) -> None:
    """Write runs to sealed files of the names that they have there, in a directory."""
    quiet = None if progress is None else not progress
    total = sum(run["bytes"] for run in runs)
    with tqdm(total=total, unit="iB", unit_scale=True, unit_divisor=1024, disable=quiet) as bar:
        for name, of_file in groupby(sorted(runs, key=lambda run: (run["file"], run["offset"])), _file_of):
            its, path = list(of_file), folder / name
            head = _head(http, its[-1])
            with path.open("wb") as out:
                out.write(head)
                for first, end in spans(len(head), its):
                    for piece in _pieces(http, its[0], first, end):
                        out.write(piece)
                        bar.update(len(piece))
            try:
                if not seal(path, {run["run_id"] for run in its}):
                    raise PullError(_CHANGED)
            except DamagedError as error:
                raise PullError(f"{error}: run `verify` there") from error


def _head(http: httpx.Client, run: Listed) -> bytes:
    """The head of a run's file."""
    size, end = _HEAD, run["offset"] + run["bytes"]
    while True:
        data = b"".join(_pieces(http, run, 0, min(size, end)))
        if (length := head_length(data)) is not None:
            return data[:length]
        if size >= end:
            raise PullError(_CHANGED)
        size *= 8


def _pieces(http: httpx.Client, run: Listed, first: int, end: int) -> Iterator[bytes]:
    """Bytes `first` to `end` of a run's file."""
    path = f"/session/{run['session_id']}/files/{_file_of(run)}"
    owner = {"owner": run["owner"] or ""} if "owner" in run else {}
    while first < end:
        # Compressed, a range would be of what is compressed.
        asked = {"Range": f"bytes={first}-{min(end, first + MOST_BYTES) - 1}", "Accept-Encoding": "identity"}
        if not (piece := _get(http, path, owner, asked).content):
            raise PullError(_CHANGED)
        yield piece
        first += len(piece)


def _get(
    http: httpx.Client, path: str, params: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> httpx.Response:
    try:
        answer = http.get(path, params=params, headers=headers)
    except httpx.RemoteProtocolError as error:
        raise PullError(f"the answer was cut off, nothing of it is kept: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PullError(f"{http.base_url}: {str(error) or type(error).__name__}") from error
    if answer.is_success:
        return answer
    try:
        reason = answer.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        reason = "it does not answer as a server of activations"
    raise PullError(f"{answer.url} answered {answer.status_code}: {reason}")


def _file_of(run: Listed) -> str:
    name = str(run["file"])
    if not _FILE_NAME.fullmatch(name):
        raise PullError(f"{name!r:.140} is no name of a file")
    return name
