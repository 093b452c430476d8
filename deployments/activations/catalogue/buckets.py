"""The runs and segments in a bucket, from its manifest.

Every function raises OSError if the bucket cannot be read.
"""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path
from urllib.parse import unquote

from deployments.activations.catalogue.database import in_memory
from deployments.activations.catalogue.manifest import Manifest
from deployments.activations.catalogue.replaying import begun, bring, lent
from deployments.activations.facts import name_of
from deployments.activations.files.places import File, Place, place_of

ARCHIVE = ".archive"  # in a store's directory: the id and the URI of its bucket; no session id begins with '.'
_read: dict[str, tuple[frozenset[str], sqlite3.Connection]] = {}  # by place, what was read of it last


def archived_to(root: Path) -> tuple[str, str] | None:
    """The id and the URI of the bucket that a directory is archived to; None where it has none."""
    try:
        id, _, uri = (root / ARCHIVE).read_text().strip().partition(" ")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return id, uri


def bucket_of(root: Path) -> Place | None:
    """The bucket that a store's directory is archived to; None where it has none.

    OSError where the directory does not say with which settings the bucket is reached.
    """
    if (said := archived_to(root)) is None:
        return None
    id, uri = said
    if (place := place_of(uri)).id != id:
        raise OSError(
            f"some runs of {root} are in its bucket {place} alone, on a server that {root / ARCHIVE} does not name: "
            f"write the bucket's settings there after its URI, as {place}?endpoint_override=HOST:PORT&scheme=http"
        )
    return place


def read_manifest(place: Place) -> sqlite3.Connection | None:
    """A catalogue's database, in memory, of what a bucket's manifest says; None where it has none."""
    manifest, key = Manifest(place), f"{place.id} {place.path}"
    while names := frozenset(manifest.names()):
        known, database = _read.get(key, (None, None))
        if known == names:
            return database
        database = begun(manifest)
        has = {name for (name,) in database.execute("SELECT name FROM applied")}
        try:
            bring(lent(database), manifest, sorted(names - has), Path(tempfile.gettempdir()))
        except OSError:
            database.close()
            # A snapshot may have replaced parts since they were listed.
            if names <= manifest.names().keys():
                raise
        else:
            _read[key] = names, database
            return database
    return None


def catalogue_of(place: Place) -> sqlite3.Connection:
    """The same; empty where the bucket has no manifest."""
    return in_memory() if (database := read_manifest(place)) is None else database


def segments_in(place: Place) -> list[File]:
    """The Arrow files of a bucket, or of a session in it, by their names."""
    database, root, session_id = at(place)
    if database is None:
        return []
    where = "? IS NULL" if session_id is None else "session = ?"  # which an index serves
    found = database.execute(f"SELECT uri FROM files WHERE {where} ORDER BY uri", (session_id,))
    return [root.file(unquote(name_of(uri))) for (uri,) in found]


def at(place: Place) -> tuple[sqlite3.Connection | None, Place, str | None]:
    """The manifest for a place, its bucket, and the session if the place is one, else None."""
    if (database := read_manifest(place)) is not None:
        return database, place, None
    above = place.above
    return (read_manifest(above) if above.path else None), above, place.path.rpartition("/")[2]
