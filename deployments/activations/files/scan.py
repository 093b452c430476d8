"""Which files a store has, by what its directory says of them: none is opened."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deployments.activations.facts import names_a_session

logger = logging.getLogger(__name__)


class Seen(NamedTuple):
    """A file of a session: its length in bytes, and when it last changed in Unix nanoseconds."""

    session_id: str
    file: Path
    bytes: int
    modified_ns: int


def scan(root: Path, missed: list[str] | None = None) -> Iterator[Seen]:
    """The Arrow files of all sessions below `root`; links are not followed, other names are passed over.

    Args:
        root: The store's.
        missed: Where sessions are added that could not be looked through.

    Raises:
        OSError: The root cannot be read.
    """
    for folder in sorted(os.scandir(root), key=lambda item: item.name):
        if names_a_session(folder.name) and folder.is_dir(follow_symlinks=False):
            try:
                yield from files_of(Path(folder.path))
            except OSError:  # one unreadable session must not keep the others from being served
                logger.exception("session %s cannot be read and is not listed", folder.name)
                if missed is not None:
                    missed.append(folder.name)


def scan_session(root: Path, session_id: str) -> Iterator[Seen]:
    """The same of one session; nothing where it has no directory.

    Raises:
        OSError: It cannot be read.
    """
    if (root / session_id).is_dir():
        yield from files_of(root / session_id)


def files_of(folder: Path) -> Iterator[Seen]:
    """The Arrow files of one directory, by their names.

    Raises:
        OSError: It cannot be read.
    """
    for item in sorted(os.scandir(folder), key=lambda item: item.name):
        if item.name.endswith(".arrow") and item.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                state = item.stat(follow_symlinks=False)
                yield Seen(folder.name, Path(item.path), state.st_size, state.st_mtime_ns)
