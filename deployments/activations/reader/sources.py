"""The files to search for stored runs: those at a path or URI, or the one that has a run id."""

from __future__ import annotations

import atexit
import os
import sqlite3
import tempfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import NamedTuple

import httpx

from deployments.activations.catalogue import buckets
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.database import read_only
from deployments.activations.facts import Entry, check_session_id
from deployments.activations.files.disk import files_of, scan
from deployments.activations.files.places import Directory, DiskFile, File, Place, Source, file_at, place_of, source_of
from deployments.activations.reader.pulling import PullError, pull
from deployments.activations.reader.selection import Wanted
from deployments.activations.segments.segments import whole_runs
from deployments.options import STORE_VARIABLE, default_store

AnySource = str | os.PathLike[str] | Source


class Located(NamedTuple):
    """A run's file, and the byte offset of the run in it."""

    run_id: str
    file: File
    offset: int


def shards(source: AnySource, session: str | None = None) -> list[File]:
    """The Arrow files of a store or session, or one file; FileNotFoundError if there is none."""
    source = source_of(source)
    if isinstance(source, File):
        return [source]
    folder = source if session is None else source.below(check_session_id(session))
    if not isinstance(source, Directory):
        found = buckets.segments_in(folder)
        if not found:
            raise FileNotFoundError(f"there is nothing at {source}" + (f" of session {session!r}" if session else ""))
        return found
    if not source.local.is_dir():
        raise FileNotFoundError(f"there is nothing at {source}")
    seen = list(files_of(source.local))  # of a session's directory
    if not seen and session is None:
        seen = list(scan(source.local))
    elif not seen:
        path = Path(folder.path)
        if not path.is_dir() or path.is_symlink():
            raise FileNotFoundError(f"there is no session {session!r} in {source}")
        seen = list(files_of(path))
    return [DiskFile(one.file) for one in seen]


def find_runs(source: Source, runs: Collection[str]) -> list[Located]:
    """Those of the runs that a store's catalogue or a bucket's manifest lists; no file is opened."""
    if isinstance(source, File):
        return []
    if isinstance(source, Directory):
        try:
            with closing(read_only(source.local.resolve())) as database:
                return _located(Catalogue(database).entries(None, runs), [])
        except (OSError, sqlite3.Error):  # the files say it, too
            return []
    manifest, place, session = buckets.at(source)
    return _located(Catalogue(manifest).entries(session, runs), [place]) if manifest else []


def _located(entries: Iterable[Entry], places: Sequence[Place]) -> list[Located]:
    return [Located(entry.facts.run_id, file_at(entry.uri, places), entry.offset) for entry in entries]


def is_run_id(source: object) -> bool:
    """Whether a source is neither path nor URI, so that it can only be a run's id."""
    return isinstance(source, str) and "/" not in source and not os.path.lexists(source)


def locate(run_id: str, root: str | os.PathLike[str] | None = None) -> Located:
    """Find a run's file in a store, or fetch it from a server into a temporary directory; by default `default_store`.

    FileNotFoundError if there is no such store, run or file; ValueError if the server refuses.
    """
    given = os.fspath(root) if root is not None else default_store()
    if given.startswith(("http://", "https://")):
        return Located(run_id, DiskFile(_fetched(given, run_id)), 0)
    store = place_of(given) if "://" in given else Directory(Path(given).expanduser().resolve())
    try:
        found = next(iter(find_runs(store, [run_id])), None)
        if found is None:
            runs = (run for file in shards(store) for run in whole_runs(file) if run.facts.run_id == run_id)
            found = next((Located(run_id, run.file, run.offset) for run in runs), None)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no store at {store}: name one as root, or by {STORE_VARIABLE}") from error
    if found is None:
        raise FileNotFoundError(
            f"there is no run {run_id!r} in {store}: name another store as root, or by {STORE_VARIABLE}"
        )
    if not found.file.exists():
        raise FileNotFoundError(f"the run {run_id!r} was in {found.file}, which is gone")
    return found


def chosen(
    source: AnySource, session: str | None, runs: Collection[str] | None, points: Collection[str] | None = None
) -> tuple[list[File], Wanted]:
    """The files in which to look for runs, and which runs and points to take of them; None for all.

    Where a store's catalogue knows all of `runs`, only their files are listed. A run's id may be the source, too.
    """
    if isinstance(runs, str):
        raise ValueError("runs: name them as a list")
    if is_run_id(source):
        return [locate(str(source)).file], Wanted(session, {str(source)}, points)
    place, wanted = source_of(source), Wanted(session, None if runs is None else set(runs), points)
    if wanted.runs and session is None:
        found = find_runs(place, wanted.runs)
        if {run.run_id for run in found} == wanted.runs:
            return sorted({run.file for run in found}, key=str), wanted
    return shards(place, session), wanted


@cache
def _fetched(url: str, run_id: str) -> Path:
    """Fetch a run's file into a directory that is removed with this process."""
    key = os.environ.get("VITRINE_API_KEY") or None
    base = url.rstrip("/").removesuffix("/v1")
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(f"{base}/v1/activations/runs", params={"run": run_id}, headers=headers, timeout=60)
        listed = answer.raise_for_status().json()["data"]
        if not listed:
            raise FileNotFoundError(f"{url} has no run {run_id!r}")
        folder = tempfile.TemporaryDirectory(prefix="vitrine-run-")
        atexit.register(folder.cleanup)
        pulled = pull(base, listed[0]["session_id"], Path(folder.name), runs=[run_id], api_key=key, progress=False)
    except (httpx.HTTPError, PullError) as error:
        raise ValueError(f"the run {run_id!r} cannot be fetched from {url}: {error}") from error
    [file] = pulled.glob("*.arrow")
    return file
