"""Where a run lies that is named by its id alone: the store's directory, or its server, is given once."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

import httpx

from deployments.activations.database import NAME
from deployments.activations.objects import AnyFile, AnyRoot, place_of
from deployments.activations.pulling import PullError, pull
from deployments.activations.reader import path_of, within
from deployments.activations.selecting import shards
from deployments.activations.shared_catalogue import find, known
from deployments.options import STORE_VARIABLE, default_store


class Located(NamedTuple):
    """A run's file, and where in it the run begins."""

    file: AnyFile
    offset: int


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
        return Located(_fetched(said, run_id), 0)
    at: AnyRoot = place_of(said) if "://" in said else Path(said).expanduser().resolve()
    if isinstance(at, Path) and not at.is_dir():
        raise FileNotFoundError(f"there is no store at {at}: name one as root, or by {STORE_VARIABLE}")
    entry = find(at, run_id)
    if entry is None:
        raise FileNotFoundError(
            f"there is no run {run_id!r} in {at}: name another store as root, or by {STORE_VARIABLE}"
        )
    file = within(None if isinstance(at, Path) else at, entry.uri)
    if not file.exists():
        raise FileNotFoundError(f"the run {run_id!r} was in {file}, which is gone")
    return Located(file, entry.offset)


def chosen(
    source: str | os.PathLike[str], session: str | None, runs: Collection[str] | None
) -> tuple[list[AnyFile], Collection[str] | None]:
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
    path = path_of(source)
    if runs is not None and session is None and isinstance(path, Path) and (path / NAME).is_file():
        entries = known(path.resolve(), runs)
        if {entry.facts.run_id for entry in entries} == set(runs):
            return sorted({within(None, entry.uri) for entry in entries}, key=str), runs
    return shards(source, session), runs


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
