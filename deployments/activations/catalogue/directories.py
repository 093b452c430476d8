"""The runs and segments of a store's directory by its catalogue, and where each segment is read from. Needs no Ray."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from deployments.activations.catalogue.buckets import bucket_of, catalogue_of
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.database import read_only
from deployments.activations.facts import Entry, name_of
from deployments.activations.files.places import DiskFile, File, Place

_T = TypeVar("_T")
Name = tuple[str, str]  # a segment's: its session and its file's name


class ElsewhereError(OSError):
    """Runs that cannot be read in this directory; the message says where they lie and what to do."""


def find(folder: Path, session_id: str | None, runs: Collection[str]) -> list[tuple[Entry, File]]:
    """Those of the runs that the directory of a store or session lists; ElsewhereError where it cannot read one."""
    root, entries = _ask(folder, session_id, lambda catalogue, only: catalogue.entries(only, runs)) or (folder, [])
    bucket = cache(partial(bucket_of, root))
    found = {entry.uri: _file(root, bucket, entry.uri, entry.archived) for entry in entries}
    if away := Counter(entry.uri for entry in entries if found[entry.uri] is None):
        raise _elsewhere(root, away)
    return [(entry, file) for entry in entries if (file := found[entry.uri])]


def segments(
    folder: Path, session_id: str | None, but: Collection[Name]
) -> tuple[dict[Name, File], ElsewhereError | None]:
    """The segments of the directory of a store or session except those named, and what to raise for the unreadable."""
    root, listed = _ask(folder, session_id, lambda catalogue, only: catalogue.segments(only)) or (folder, [])
    bucket, found, away = cache(partial(bucket_of, root)), dict[Name, File](), Counter[str]()
    for session, uri, archived, runs in listed:
        name = session, unquote(uri.rpartition("/")[2])
        if name in but:
            continue
        if (file := _file(root, bucket, uri, archived)) is None:
            away[uri] += runs
        elif file.local is None or file.exists():  # one that was deleted may be listed still
            found[name] = file
    return found, _elsewhere(root, away) if away else None


def _file(root: Path, bucket: Callable[[], Place | None], uri: str, archived: bool) -> File | None:
    """A segment by its URI in the catalogue: on the disk, else in the bucket; None where it is in neither."""
    name = unquote(name_of(uri))
    path = root / name
    if path.is_file():
        return DiskFile(path)
    if archived and (place := bucket()):
        return place.file(name)
    return DiskFile(path) if uri.startswith("file:") else None


def _ask(folder: Path, session_id: str | None, ask: Callable[[Catalogue, str | None], _T]) -> tuple[Path, _T] | None:
    """A store's directory and what its catalogue says of a session or of all; None where there is no catalogue.

    `folder` is the store's directory or a session's. Where its database cannot be trusted, as in a copy, the catalogue
    is its bucket's.
    """
    for root, only in ((folder, session_id), (folder.parent, folder.name)):
        try:
            with closing(read_only(root)) as database:
                return root, ask(Catalogue(database), only)
        except (OSError, sqlite3.Error):  # the files on the disk say what they hold, too
            if bucket := bucket_of(root):
                return root, ask(Catalogue(catalogue_of(bucket)), only)
    return None


def _elsewhere(root: Path, away: Counter[str]) -> ElsewhereError:
    """The error that names the nodes of such segments; `away` has the runs of each by its URI."""
    from deployments.activations.state.nodes import Nodes, node_of  # imports Ray

    nodes, runs = Nodes(root, read_only=True).all(), away.total()
    keys = {uri: node_of(uri) for uri in away}
    where = {f"node {nodes[key].name}" if key in nodes else uri.rsplit("/", 2)[0] for uri, key in keys.items()}
    return ElsewhereError(
        f"{runs} {'run lies' if runs == 1 else 'runs lie'} on {', '.join(sorted(where))}, not in {root}: load a run by "
        "its id from the server, root='http://HOST:8000', or fetch the session by "
        "`python -m deployments.activations pull http://HOST:8000 SESSION --dir DIRECTORY`"
    )
