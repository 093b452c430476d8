"""The files to search for stored runs: those at a path or URI, or the one that has a run id.

Whatever is read is a local file. A bucket's files are copied to a temporary directory, which is removed with this
process, and so are runs of a server.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from deployments.activations.facts import RunRecord, check_session_id, names_a_session
from deployments.activations.files.buckets import Bucket, bucket
from deployments.activations.index.index import Index
from deployments.activations.reader.pulling import PullError, fetch
from deployments.activations.reader.selection import Wanted
from deployments.activations.segments.segments import WholeRun, whole_runs
from deployments.options import STORE_VARIABLE, default_store

_COPIES = 8  # files of a bucket that are copied at a time
_copies: dict[str, Path] = {}  # of a bucket's files, by their URIs

AnySource = str | os.PathLike[str]


class SourceFile(NamedTuple):
    """A file of a source: a path on the disk, or a name in a bucket, where it has `bytes`."""

    name: str
    bucket: Bucket | None = None
    bytes: int = 0

    def here(self) -> Path:
        """The file on the disk, which is copied if it is not there. OSError if the bucket refuses."""
        if self.bucket is None:
            return Path(self.name)
        if (copy := _copies.get(uri := self.bucket.uri_of(self.name))) is None:
            copy = Path(tempfile.mkdtemp(dir=_temporary())) / Path(self.name).name
            self.bucket.fetch(self.name, copy)
            _copies[uri] = copy
        return copy


def segments(source: AnySource, session: str | None = None) -> list[Path]:
    """The Arrow files of a source: of a store, of an owner, of a session, or one file.

    A source is a path, or a URI, `file://` or of a bucket. `session` chooses the sessions of that name.
    FileNotFoundError if there is nothing; OSError if a bucket refuses, or its files do not fit the disk.
    """
    found = files_of(source, session)
    if away := [one for one in found if one.bucket and one.bucket.uri_of(one.name) not in _copies]:
        needed, free = sum(one.bytes for one in away), shutil.disk_usage(folder := _temporary()).free
        if needed > free:
            raise OSError(
                f"{needed} bytes of {len(away)} files that are in a bucket do not fit {folder}, which has {free}: "
                "choose a session, or name a directory on a larger disk by the variable TMPDIR"
            )
    with ThreadPoolExecutor(_COPIES) as pool:
        return list(pool.map(SourceFile.here, found))


def files_of(source: AnySource, session: str | None = None) -> list[SourceFile]:
    """The same, of which a bucket's files are not copied yet."""
    if session is not None:
        check_session_id(session)
    text, is_there = os.fspath(source), False
    if _is_remote(text):
        found = _of_bucket(text, session)
    elif (path := _path_of(text)).is_file():
        return [SourceFile(str(path))]
    else:
        found = [*_of_directory(path, session), *_only_archived(path, session)]
        is_there = path.is_dir() and session is None
    if not found and not is_there:
        missing = "there is nothing at" if session is None else f"there is no session {session!r} in"
        raise FileNotFoundError(f"{missing} {text.partition('?')[0]}")
    return found


def is_run_id(source: object) -> bool:
    """Whether a source is neither path nor URI, so that it can only be a run's id."""
    return isinstance(source, str) and "/" not in source and not os.path.lexists(source)


def locate(run_id: str, root: AnySource | None = None) -> tuple[Path, int]:
    """Find a run in a store, or fetch it from a server, by default `default_store`: its file, and its offset there.

    FileNotFoundError if there is no such store or run; OSError if the bucket refuses, ValueError if the server does.
    """
    given = os.fspath(root) if root is not None else default_store()
    how = f"name another as root, or by {STORE_VARIABLE}"
    if given.startswith(("http://", "https://")):
        return _of_server(given, run_id), 0
    try:
        found = next(find(given, run_id), None)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no store at {given}: {how}") from error
    if found is None:
        raise FileNotFoundError(f"there is no run {run_id!r} in {given.partition('?')[0]}: {how}")
    return found.path, found.offset


def find(source: AnySource, run_id: str) -> Iterator[WholeRun]:
    """The runs of this id in a source: by the index that knows it, else by a look through the files.

    A bucket's files are copied one by one. Errors are as of `segments`.
    """
    for file, entry in _indexed(source, {run_id}):
        run = next(whole_runs(file.here(), entry.offset), None)
        if run is not None and run.facts.run_id == run_id:  # else the index is an older one
            yield run
            return
    for file in files_of(source):
        yield from (run for run in whole_runs(file.here()) if run.facts.run_id == run_id)


def chosen(
    source: AnySource, session: str | None, runs: Collection[str] | None, points: Collection[str] | None = None
) -> tuple[list[Path], Wanted]:
    """The files in which to look for runs, and which runs and points to take of them; None for all.

    Where a store's index knows all of `runs`, only their files are listed. A run's id may be the source, too.
    """
    if isinstance(runs, str):
        raise ValueError("runs: name them as a list")
    if is_run_id(source):
        return [locate(str(source))[0]], Wanted(session, {str(source)}, points)
    wanted = Wanted(session, None if runs is None else set(runs), points)
    if wanted.runs:
        known = [one for one in _indexed(source, wanted.runs) if session in (None, one[1].facts.session_id)]
        if sorted(entry.facts.run_id for _, entry in known) == sorted(wanted.runs):
            return sorted({file.here() for file, _ in known}), wanted
    return segments(source, session), wanted


def _is_remote(source: str) -> bool:
    return "://" in source and not source.startswith("file://")


def _path_of(source: str) -> Path:
    is_uri = source.startswith("file://")
    return Path(unquote(urlsplit(source).path) if is_uri else source).expanduser().resolve()


def _of_directory(folder: Path, session: str | None, depth: int = 2) -> Iterator[SourceFile]:
    """Files of a session's directory, an owner's or a store's; links are not followed."""
    if not folder.is_dir():
        return
    for item in sorted(os.scandir(folder), key=lambda item: item.name):
        if item.name.endswith(".arrow") and session in (None, folder.name) and item.is_file(follow_symlinks=False):
            yield SourceFile(item.path)
        elif depth and item.is_dir(follow_symlinks=False) and names_a_session(item.name):
            yield from _of_directory(Path(item.path), session, depth - 1)


def _of_bucket(uri: str, session: str | None) -> list[SourceFile]:
    at = bucket(uri)
    if at.path.endswith(".arrow"):
        folder, _, name = at.path.rpartition("/")
        at = Bucket(at.fs, folder, at.uri.rpartition("/")[0])
        return [] if (size := at.size(name)) is None else [SourceFile(name, at, size)]
    found = list[SourceFile]()
    for name, size in sorted(at.list().items()):
        *above, _ = name.split("/")
        folder = above[-1] if above else at.path.rpartition("/")[2]
        if name.endswith(".arrow") and len(above) <= 2 and session in (None, folder):
            found.append(SourceFile(name, at, size))
    return found


def _stores(folder: Path) -> Iterator[tuple[Index, str]]:
    """The index of the store that a directory is, or is in, with the directory's path below the store's."""
    below = ""
    for root in (folder, *folder.parents[:2]):
        if (index := Index.reading(root)) is not None:
            with closing(index):
                yield index, below
        below = f"{root.name}/{below}"


def _indexed(source: AnySource, runs: Collection[str]) -> list[tuple[SourceFile, RunRecord]]:
    """Those of some runs that a store's index knows below a directory, with their files."""
    found = list[tuple[SourceFile, RunRecord]]()
    if _is_remote(text := os.fspath(source)):
        return found
    for index, below in _stores(_path_of(text)):
        for entry in index.entries(runs):
            if entry.path.startswith(below) and (path := index.root / entry.path).is_file():
                found.append((SourceFile(str(path)), entry))
            elif entry.path.startswith(below) and entry.archived:
                found.append((SourceFile(entry.path, bucket(index.archive_uri)), entry))
    return found


def _only_archived(folder: Path, session: str | None) -> Iterator[SourceFile]:
    """Files of a local store that only its archive has."""
    for index, below in _stores(folder):
        for path, size in index.select("SELECT path, bytes FROM files WHERE NOT local AND rows IS NOT 0"):
            if path.startswith(below) and session in (None, path.split("/")[1]):
                yield SourceFile(path, bucket(index.archive_uri), size)


@lru_cache(16)
def _of_server(url: str, run_id: str) -> Path:
    """Fetch a run from a server; its file stays until this process ends."""
    folder = Path(tempfile.mkdtemp(dir=_temporary()))
    try:
        fetch(url, folder, None, [run_id], os.environ.get("VITRINE_API_KEY") or None, progress=False)
    except (PullError, LookupError, TypeError) as error:
        raise ValueError(f"the run {run_id!r} cannot be fetched from {url}: {error}") from error
    [path] = folder.glob("*.arrow")
    return path


@cache
def _temporary() -> Path:
    """A directory that is removed with this process."""
    folder = tempfile.TemporaryDirectory(prefix="vitrine-runs-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
