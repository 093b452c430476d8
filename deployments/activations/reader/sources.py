"""Where to read stored runs: the files at a path or URI, or the one that has a run id, and runs and points of them.

Whatever is read is a local file. A bucket's files are copied to a temporary directory, which is removed with this
process, and so are runs of a server.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from deployments.activations.archive import Bucket, bucket
from deployments.activations.facts import PointType, RunRecord, check_session_id, names_a_session
from deployments.activations.index.index import Index
from deployments.activations.reader.pulling import PullError, fetch
from deployments.activations.segments.schema import file_info, point_types
from deployments.activations.segments.segments import RunBatches, batches_of, whole_runs
from deployments.errors import RequestError
from deployments.options import STORE_VARIABLE, default_store
from deployments.points.names import matching, nearest, some

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
    files = files_of(source, session)
    if away := [file for file in files if file.bucket and file.bucket.uri_of(file.name) not in _copies]:
        needed, free = sum(file.bytes for file in away), shutil.disk_usage(folder := _temporary()).free
        if needed > free:
            raise OSError(
                f"{needed} bytes of {len(away)} files that are in a bucket do not fit {folder}, which has {free}: "
                "choose a session, or name a directory on a larger disk by the variable TMPDIR"
            )
    with ThreadPoolExecutor(_COPIES) as pool:
        return list(pool.map(SourceFile.here, files))


def files_of(source: AnySource, session: str | None = None) -> list[SourceFile]:
    """The files of a source, as `segments` has them, of which a bucket's are not copied yet."""
    if session is not None:
        check_session_id(session)
    text, is_there = os.fspath(source), False
    if _is_remote(text):
        files = _of_bucket(text, session)
    elif (path := _path_of(text)).is_file():
        return [SourceFile(str(path))]
    else:
        files = [*_of_directory(path, session), *_only_archived(path, session)]
        is_there = path.is_dir() and session is None
    if not files and not is_there:
        missing = "there is nothing at" if session is None else f"there is no session {session!r} in"
        raise FileNotFoundError(f"{missing} {text.partition('?')[0]}")
    return files


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
        run = next(find(given, run_id), None)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no store at {given}: {how}") from error
    if run is None:
        raise FileNotFoundError(f"there is no run {run_id!r} in {given.partition('?')[0]}: {how}")
    return run.path, run.offset


def find(source: AnySource, run_id: str) -> Iterator[RunBatches]:
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
        known = [item for item in _indexed(source, wanted.runs) if session in (None, item[1].facts.session_id)]
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
    files = list[SourceFile]()
    for name, size in sorted(at.list().items()):
        *above, _ = name.split("/")
        folder = above[-1] if above else at.path.rpartition("/")[2]
        if name.endswith(".arrow") and len(above) <= 2 and session in (None, folder):
            files.append(SourceFile(name, at, size))
    return files


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
    files = list[tuple[SourceFile, RunRecord]]()
    if _is_remote(text := os.fspath(source)):
        return files
    for index, below in _stores(_path_of(text)):
        for entry in index.entries(runs):
            if entry.path.startswith(below) and (path := index.root / entry.path).is_file():
                files.append((SourceFile(str(path)), entry))
            elif entry.path.startswith(below) and entry.archived:
                files.append((SourceFile(entry.path, bucket(index.archive_uri)), entry))
    return files


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


class Wanted(NamedTuple):
    """Which runs and points to read; None is all."""

    session: str | None = None
    runs: Collection[str] | None = None
    points: Collection[str] | None = None  # names and patterns, as for `names.recorded`

    def of(self, schema: pa.Schema) -> dict[str, PointType]:
        """The wanted points of a file; RequestError for a negative layer if the number of layers is not recorded."""
        types = point_types(schema)
        if self.points is None:
            return types
        layers = file_info(schema).layers
        try:
            chosen = {name for pattern in self.points for name in matching(pattern, types, layers)}
        except ValueError as error:
            raise RequestError(str(error), "points") from error
        return {name: kind for name, kind in types.items() if name in chosen}

    def check(self, runs: Collection[str], points: Collection[str]) -> None:
        """Raise RequestError, which lists some that exist, if a wanted run or point is not among these."""
        if self.runs is not None and (unknown := [run for run in self.runs if run not in runs]):
            message = f"there is no run {unknown[0]!r}; there is {some(sorted(runs))}"
            raise RequestError(message, "run", "run_not_found", 404)
        any_layer = (re.sub(r"\.-\d+\.", ".*.", name) for name in self.points or ())  # whichever it is in its file
        absent = [name for name, at in zip(self.points or (), any_layer, strict=True) if not matching(at, points)]
        if absent:
            message = f"no such run recorded {absent[0]!r}; there is {nearest(absent[0], sorted(points))}"
            raise RequestError(message, "points", "point_not_recorded")


def select(files: Iterable[Path], wanted: Wanted) -> Iterator[RunBatches]:
    """The wanted runs of files that have a wanted point, in file order, with these points alone.

    At the end RequestError, as of `Wanted.check`, if none was such a run, or had such a point.
    """
    runs, points = set[str](), set[str]()
    for file in files:
        types: Mapping[str, PointType] | None = None  # all runs of a file have the same points
        for run in whole_runs(file):
            if wanted.session not in (None, run.facts.session_id):
                continue
            runs.add(run.facts.run_id)
            if wanted.runs is None or run.facts.run_id in wanted.runs:
                points.update(run.types)
                types = wanted.of(run.batches[0].schema) if types is None else types
                if types:
                    yield run._replace(types=types)
    wanted.check(runs, points)


def by_schema(files: Iterable[Path]) -> list[tuple[pa.Schema, list[Path]]]:
    """Group files by schema: by session, model, points and dtypes."""
    groups = dict[bytes, tuple[pa.Schema, list[Path]]]()
    for file in files:
        if first := next(batches_of(file), None):
            groups.setdefault(first.schema.serialize().to_pybytes(), (first.schema, []))[1].append(file)
    return list(groups.values())
