"""Buckets of earlier versions, which have no manifest: small objects, and marks of those that are deleted.

`.deleted-<session>-<random>`, next to the sessions, lists objects of a deleted session. `<name>.joined`, in a session
next to the object `<name>.arrow`, lists the small objects that were merged into it. A server that starts on such a
bucket scans it once and writes a manifest. Until then readers scan it each time.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from deployments.activations.facts import names_a_session
from deployments.activations.files.disk import DELETED
from deployments.activations.files.places import DamagedError, File, Place

_JOINED, _ARROW = ".joined", ".arrow"
_AT_ONCE = 16  # objects that are read at a time

logger = logging.getLogger(__name__)


def counted(place: Place, deep: bool = False) -> list[File]:
    """The Arrow files in a bucket and, if `deep`, its sessions by their names, without those that marks take away."""
    infos = place.infos(deep)
    sizes, gone = {info.path: info.size for info in infos}, set[str]()
    for path, mark in _marks(place, infos):
        folder = posixpath.join(place.path, mark["session"]) if mark["session"] else posixpath.dirname(path)
        named, large = [posixpath.join(folder, name) for name in mark["objects"]], path.removesuffix(_JOINED) + _ARROW
        gone.update(named if mark["session"] or sizes.get(large) == mark["bytes"] else [large])
    names = sorted(posixpath.relpath(info.path, place.path) for info in infos if info.path not in gone)
    return [place.file(name) for name in names if name.endswith(_ARROW) and not name.startswith(".")]


def lines(place: Place) -> Iterator[dict[str, Any]]:
    """What the manifest of an old bucket is to say: a line for each object, and for each deletion that was begun."""
    for path, mark in _marks(place, place.infos()):
        if mark["session"]:
            names = [f"{mark['session']}/{name}" for name in mark["objects"] if name.endswith(_ARROW)]
            yield {"deleted": mark["session"], "segments": [*names, posixpath.relpath(path, place.path)], "at": 0.0}
    files = [file for file in counted(place, deep=True) if names_a_session(file.folder.name)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from filter(None, pool.map(_line, files))


def _line(file: File) -> dict[str, Any] | None:
    from deployments.activations.segments.segments import whole_runs  # which a bucket of this version needs not

    found = list[dict[str, Any]]()
    points: dict[str, Any] = {}
    try:
        for run in whole_runs(file):
            points = points or dict(run.types)
            told = {name: getattr(run, name) for name in ("first_row", "rows", "bytes", "offset")}
            found.append({"facts": vars(run.facts) | {"interventions": [], "text": None}, **told})
    except (DamagedError, pa.ArrowException) as error:
        logger.error("%s is damaged (%s): %d runs before the damage are listed", file, error, len(found))
    if not found:
        logger.error("%s holds no whole run and is not listed", file)
        return None
    rows = sum(run["rows"] for run in found)
    segment = f"{file.folder.name}/{file.name}"
    return {"segment": segment, "bytes": file.size, "rows": rows, "points": points, "runs": found}


def _marks(root: Place, infos: Iterable[Any]) -> list[tuple[str, dict[str, Any]]]:
    """The marks among objects, each with its path; those that say nothing are logged."""

    def read_one(path: str) -> list[tuple[str, dict[str, Any]]]:
        is_deletion = path.startswith(beginning)
        try:
            mark = json.loads(root.file(posixpath.relpath(path, root.path)).read())
            named = names_a_session(mark["session"]) if is_deletion else not mark["session"]
            if named and all(isinstance(name, str) for name in mark["objects"]) and "bytes" in mark:
                return [(path, mark)]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, KeyError):
            pass
        logger.error("%s does not list the objects to delete, so none is deleted; remove it", path)
        return []

    beginning = posixpath.join(root.path, DELETED)
    paths = [info.path for info in infos]
    found = [path for path in paths if path.endswith(_JOINED) or path.startswith(beginning)]
    if not found:
        return []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [one for some in pool.map(read_one, found) for one in some]
