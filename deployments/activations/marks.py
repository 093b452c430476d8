"""Objects that say which others of a bucket go: what renaming is on a disk.

`.deleted-<session>-<random>` beside the sessions; and in a session, beside an object `<name>.arrow` that smaller ones
became, `<name>.joined`.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from deployments.activations.facts import names_a_session
from deployments.activations.holding import DELETED
from deployments.activations.objects import ObjectFile, Place

JOINED = ".joined"
ARROW = ".arrow"
_AT_ONCE = 16  # objects that are asked for beside each other

logger = logging.getLogger(__name__)


class Mark(NamedTuple):
    """Objects that go: at once, or once they have become one that is whole.

    Attributes:
        objects: Their names.
        session: Whose they are, where they are deleted; else it is the one that the mark lies in.
        bytes: How long the object is that they became.
        xxh3: Its checksum, XXH3 of 128 bits as hex digits.
    """

    objects: list[str]
    session: str = ""
    bytes: int = 0
    xxh3: str = ""

    def write(self, file: ObjectFile) -> None:
        """Write it down; durable when this returns.

        Raises:
            OSError: The store refuses.
        """
        file.write(json.dumps(self._asdict()).encode())


def read(file: ObjectFile) -> Mark:
    """The inverse of `Mark.write`.

    Raises:
        FileNotFoundError: It is gone: what it said is done.
        OSError: The store refuses.
        ValueError: It says nothing; the message names it.
    """
    try:
        mark = Mark(**json.loads(file.read()))
        named = names_a_session(mark.session) if file.name.startswith(DELETED) else not mark.session
        if named and all(isinstance(name, str) for name in mark.objects):
            return mark
    except (ValueError, TypeError):
        pass
    raise ValueError(f"{file} does not say which objects go, and none does: remove it")


def uncounted(root: Place, infos: Sequence[Any]) -> set[str]:
    """Of objects, the paths of those that count no more, or not yet.

    Args:
        root: The store's, or one of its sessions'.
        infos: What `Place.infos` says of it.

    Raises:
        OSError: The store refuses.
    """
    sizes = {info.path: info.size for info in infos}
    found = set[str]()
    for path, mark in _read_all(root, sizes):
        if mark.session:
            found.update(posixpath.join(root.path, mark.session, name) for name in mark.objects)
            continue
        large = path.removesuffix(JOINED) + ARROW
        whole = sizes.get(large) == mark.bytes
        found.update([posixpath.join(posixpath.dirname(path), name) for name in mark.objects] if whole else [large])
    return found


def counted(place: Place, deep: bool = False) -> list[ObjectFile]:
    """The Arrow files in a directory by their names; with `deep`, also those in the directories in it.

    Raises:
        OSError: The store refuses.
    """
    infos = place.infos(deep)
    gone = uncounted(place, infos)
    names = sorted(posixpath.relpath(info.path, place.path) for info in infos if info.path not in gone)
    return [place.file(name) for name in names if name.endswith(ARROW) and not name.startswith(".")]


def joined(session: Place) -> set[str]:
    """The names of a session's objects that become one, or have.

    Raises:
        OSError: The store refuses.
    """
    marks = _read_all(session, (info.path for info in session.infos()))
    return {name for _, mark in marks for name in mark.objects}


def _read_all(root: Place, paths: Iterable[str]) -> list[tuple[str, Mark]]:
    """The marks among objects, each with its path; those that say nothing are logged."""

    def read_one(path: str) -> list[tuple[str, Mark]]:
        try:
            return [(path, read(root.file(posixpath.relpath(path, root.path))))]
        except FileNotFoundError:
            return []
        except ValueError:
            logger.exception("%s is passed over", path)
            return []

    beginning = posixpath.join(root.path, DELETED)
    found = [path for path in paths if path.endswith(JOINED) or path.startswith(beginning)]
    if not found:
        return []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [one for some in pool.map(read_one, found) for one in some]
