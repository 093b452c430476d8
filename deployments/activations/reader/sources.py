"""Where a run lies that is named by its id alone: the store's directory, or its server, is given once."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Collection
from functools import cache
from pathlib import Path

import httpx

from deployments.activations.export.pulling import PullError, pull
from deployments.activations.files.places import Directory, DiskFile, File, Located, Source, place_of, source_of
from deployments.activations.segments.segments import whole_runs
from deployments.options import STORE_VARIABLE, default_store


def is_run_id(source: object) -> bool:
    """Whether a source is no path or URI, and so can only be the id of a run."""
    return isinstance(source, str) and "/" not in source and not os.path.lexists(source)


def locate(run_id: str, root: str | os.PathLike[str] | None = None) -> Located:
    """A run's file, by the store's catalogue or from a server.

    Args:
        run_id: The run.
        root: The store's directory or URI, or the `http` address of a server, from which the run is fetched into a
            temporary directory; the key is the variable `VITRINE_API_KEY`. By default `default_store`.

    Raises:
        FileNotFoundError: There is no such store or run, or the run's file is gone.
        ValueError: The server refuses.
    """
    said = os.fspath(root) if root is not None else default_store()
    if said.startswith(("http://", "https://")):
        return Located(run_id, DiskFile(_fetched(said, run_id)), 0)
    store = place_of(said) if "://" in said else Directory(Path(said).expanduser().resolve())
    try:
        found = next(iter(store.find([run_id])), None) or _looked_for(store, run_id)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no store at {store}: name one as root, or by {STORE_VARIABLE}") from error
    if found is None:
        raise FileNotFoundError(
            f"there is no run {run_id!r} in {store}: name another store as root, or by {STORE_VARIABLE}"
        )
    if not found.file.exists():
        raise FileNotFoundError(f"the run {run_id!r} was in {found.file}, which is gone")
    return found


def _looked_for(store: Source, run_id: str) -> Located | None:
    runs = (run for file in store.segments() for run in whole_runs(file))
    return next((Located(run_id, run.file, run.offset) for run in runs if run.facts.run_id == run_id), None)


def chosen(
    source: str | os.PathLike[str], session: str | None, runs: Collection[str] | None
) -> tuple[list[File], Collection[str] | None]:
    """The files in which to look for runs, and which runs are meant; None for all.

    Args:
        source: A store's or session's directory, or one file, as a path or `file://` URI; or the id of a run, which
            is looked for as by `locate`.
        session: This session's runs alone.
        runs: These runs alone. Where a store's catalogue knows them all, no other files are looked at.

    Raises:
        FileNotFoundError: There is no such source, session or run.
        ValueError: `session` can name none.
    """
    if is_run_id(source):
        return [locate(str(source)).file], {str(source)}
    place = source_of(source)
    if runs and session is None:
        found = place.find(runs)
        if {run.run_id for run in found} == set(runs):
            return sorted({run.file for run in found}, key=str), runs
    return place.segments(session), runs


@cache
def _fetched(url: str, run_id: str) -> Path:
    """A run's file in a directory that goes with this process."""
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
