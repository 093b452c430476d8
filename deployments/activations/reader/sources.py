"""The files to search for stored runs: those at a path or URI, or the one that has a run id."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import httpx

from deployments.activations.catalogue import buckets, directories
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.directories import ElsewhereError
from deployments.activations.facts import check_session_id
from deployments.activations.files.disk import files_of, scan
from deployments.activations.files.places import Directory, DiskFile, File, Source, file_at, place_of, source_of
from deployments.activations.reader.pulling import PullError, pull
from deployments.activations.reader.selection import Wanted
from deployments.activations.segments.segments import whole_runs
from deployments.options import STORE_VARIABLE, default_store

_FETCHES = 8  # files of a bucket that are copied at a time
_MOST_FETCHED = 16  # runs of servers whose files are there for another call
_copies: dict[File, DiskFile] = {}  # in a temporary directory, of files of a bucket, and files of servers' runs
AnySource = str | os.PathLike[str] | Source


class Located(NamedTuple):
    """A run's file, and the byte offset of the run in it."""

    run_id: str
    file: File
    offset: int


def segments(source: AnySource, session: str | None = None) -> list[File]:
    """The Arrow files of a store or session, or one file: of a store's directory also those in its bucket alone.

    FileNotFoundError if there is none, ElsewhereError if some lie on other nodes.
    """
    found, away = readable(source, session)
    if away:
        raise away
    return found


def readable(source: AnySource, session: str | None = None) -> tuple[list[File], ElsewhereError | None]:
    """The same, but the error is not raised."""
    source = source_of(source)
    if isinstance(source, File):
        return [source], None
    folder = source if session is None else source.below(check_session_id(session))
    if not isinstance(source, Directory):
        found = buckets.segments_in(folder)
        if not found:
            raise FileNotFoundError(f"there is nothing at {source}" + (f" of session {session!r}" if session else ""))
        return found, None
    root = source.local.resolve()
    path = root / session if session else root
    is_there = path.is_dir() and not (session and path.is_symlink())
    seen = list(files_of(root)) if root.is_dir() else []  # of a session's directory
    if not seen and is_there:
        seen = list(files_of(path) if session else scan(root))
    on_disk: dict[directories.Name, File] = {(one.session_id, one.file.name): DiskFile(one.file) for one in seen}
    others, away = directories.segments(root, session, on_disk)
    if not (on_disk or others or away or is_there):
        missing = f"there is no session {session!r} in" if root.is_dir() else "there is nothing at"
        raise FileNotFoundError(f"{missing} {source}")
    return [file for _, file in sorted((on_disk | others).items())], away


def find_runs(source: Source, runs: Collection[str], session: str | None = None) -> list[Located]:
    """Those of the runs that a store's catalogue or a bucket's manifest lists; no file is opened.

    ElsewhereError if one of them lies on another node.
    """
    if isinstance(source, File):
        return []
    if isinstance(source, Directory):
        found = directories.find(source.local.resolve(), session, runs)
        return [Located(entry.facts.run_id, file, entry.offset) for entry, file in found]
    manifest, place, only = buckets.at(source)
    entries = Catalogue(manifest).entries(only or session, runs) if manifest else []
    return [Located(entry.facts.run_id, file_at(entry.uri, [place]), entry.offset) for entry in entries]


def is_run_id(source: object) -> bool:
    """Whether a source is neither path nor URI, so that it can only be a run's id."""
    return isinstance(source, str) and "/" not in source and not os.path.lexists(source)


def locate(run_id: str, root: str | os.PathLike[str] | None = None) -> Located:
    """Find a run's file in a store, or fetch it from a server; by default `default_store`.

    A fetched file stays in a temporary directory while it is in use or among the last ones. FileNotFoundError if there
    is no such store, run or file; ElsewhereError if it lies on another node; OSError if the bucket refuses, ValueError
    if the server does.
    """
    given = os.fspath(root) if root is not None else default_store()
    if given.startswith(("http://", "https://")):
        return Located(run_id, _fetched(given, run_id), 0)
    store = place_of(given) if "://" in given else Directory(Path(given).expanduser().resolve())
    try:
        found = next(iter(find_runs(store, [run_id])), None)
        if found is None:  # what a catalogue says of files elsewhere is whole
            files = [file for file in readable(store)[0] if file.local or not isinstance(store, Directory)]
            runs = (run for file in files for run in whole_runs(file) if run.facts.run_id == run_id)
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
    if wanted.runs:
        found = find_runs(place, wanted.runs, session)
        if {run.run_id for run in found} == wanted.runs:
            return sorted({run.file for run in found}, key=str), wanted
    return segments(place, session), wanted


def on_disk(files: Sequence[File]) -> list[DiskFile]:
    """The same files, those of a bucket as copies in a temporary directory, which is removed with this process.

    OSError if they do not fit its disk, or the bucket refuses.
    """
    _copies.update((file, file) for file in files if isinstance(file, _Fetched))
    if away := {file for file in files if file.local is None and file not in _copies}:
        folder = _temporary()
        with ThreadPoolExecutor(_FETCHES) as pool:
            needed, free = sum(pool.map(attrgetter("size"), away)), shutil.disk_usage(folder).free
            if needed > free:
                raise OSError(
                    f"{needed} bytes of {len(away)} files that are in a bucket do not fit {folder}, which has {free}: "
                    "choose fewer runs, or name a directory on a larger disk by the variable TMPDIR"
                )
            list(pool.map(_copy, away))
    return [file if isinstance(file, DiskFile) else _copies[file] for file in files]


def _copy(file: File) -> None:
    copy = _temporary() / f"{secrets.token_hex(8)}.arrow"
    file.fetch(copy)
    _copies[file] = DiskFile(copy)


class _Fetched(DiskFile):
    """A run's file from a server, in a temporary directory as long as this object is in use; maps of it stay valid."""


@lru_cache(_MOST_FETCHED)
def _fetched(url: str, run_id: str) -> _Fetched:
    """Fetch a run from a server."""
    key = os.environ.get("VITRINE_API_KEY") or None
    base = url.rstrip("/").removesuffix("/v1")
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        wanted = {"run": run_id, "limit": "1"}
        answer = httpx.get(f"{base}/v1/activations/runs", params=wanted, headers=headers, timeout=60)
        listed = answer.raise_for_status().json()["data"]
        if not listed:
            raise FileNotFoundError(f"{url} has no run {run_id!r}")
        folder = Path(tempfile.mkdtemp(dir=_temporary()))
        pulled = pull(base, listed[0]["session_id"], folder, runs=[run_id], api_key=key, progress=False)
    except (httpx.HTTPError, PullError) as error:
        raise ValueError(f"the run {run_id!r} cannot be fetched from {url}: {error}") from error
    [path] = pulled.glob("*.arrow")
    weakref.finalize(file := _Fetched(path), shutil.rmtree, folder, ignore_errors=True)
    return file


@cache
def _temporary() -> Path:
    """A directory that is removed with this process."""
    folder = tempfile.TemporaryDirectory(prefix="vitrine-runs-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
