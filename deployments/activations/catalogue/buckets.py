"""The runs and segments of a bucket, by its manifest; by its objects where an earlier version wrote it."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Collection
from pathlib import Path
from urllib.parse import unquote

from deployments.activations.catalogue import old_buckets
from deployments.activations.catalogue.database import lay_out
from deployments.activations.catalogue.manifest import Bases, Manifest
from deployments.activations.catalogue.replaying import bring, replay
from deployments.activations.facts import name_of
from deployments.activations.files.places import File, Place
from deployments.activations.files.sqlite import connected

_read: dict[str, tuple[frozenset[str], sqlite3.Connection]] = {}  # by place, what was read of it last


def read_manifest(place: Place) -> sqlite3.Connection | None:
    """A catalogue's database, in memory, of what a bucket's manifest says; None where it has none.

    Raises:
        OSError: The bucket refuses.
    """
    manifest = Manifest(place)
    names = frozenset(manifest.names())
    if not names:
        return None
    before = _read.get(key := f"{place.id} {place.path}")
    if before is None or before[0] != names:
        database = connected(":memory:")
        lay_out(database, 0)
        bring(database, manifest, sorted(names), Path(tempfile.gettempdir()))
        before = _read[key] = names, database
    return before[1]


def catalogue_of(place: Place) -> sqlite3.Connection:
    """The same, or of a bucket of an earlier version what its objects say.

    Raises:
        OSError: The bucket refuses.
    """
    database = read_manifest(place)
    if database is None:
        database = connected(":memory:")
        lay_out(database, 0)
        replay(database, None, old_buckets.lines(place), Bases(place.uri))
    return database


def segments_in(place: Place) -> list[File]:
    """The Arrow files of a bucket, or of a session in it, by their names.

    Raises:
        OSError: The bucket refuses.
    """
    database, root, session_id = _at(place)
    if database is None:
        return old_buckets.counted(place) or old_buckets.counted(place, deep=True)
    found = database.execute("SELECT uri FROM files WHERE ? IN ('', session) ORDER BY uri", (session_id,))
    return [root.file(unquote(name_of(uri))) for (uri,) in found]


def find_runs(place: Place, runs: Collection[str]) -> list[tuple[str, File, int]]:
    """The files of a bucket, or of a session in it, that hold runs, each with its run and the byte where that begins.

    Empty where there is no manifest.

    Raises:
        OSError: The bucket refuses.
    """
    database, root, session_id = _at(place)
    if database is None:
        return []
    found = database.execute(
        """SELECT runs.run_id, files.uri, runs.offset FROM runs JOIN files ON files.id = runs.file
        WHERE runs.run_id IN (SELECT value FROM json_each(?)) AND ? IN ('', runs.session)""",
        (json.dumps([*runs]), session_id),
    )
    return [(run_id, root.file(unquote(name_of(uri))), offset) for run_id, uri, offset in found.fetchall()]


def _at(place: Place) -> tuple[sqlite3.Connection | None, Place, str]:
    """The manifest that tells of a place, the bucket that it is of, and the session that the place is, or ''."""
    if (database := read_manifest(place)) is not None:
        return database, place, ""
    above = place.above
    return (read_manifest(above) if above.path else None), above, place.path.rpartition("/")[2]
