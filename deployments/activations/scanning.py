"""Which files a store has, by what its directory says of them: none is opened."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deployments.activations.facts import check_session_id

logger = logging.getLogger(__name__)


class Seen(NamedTuple):
    """A file of a session: its length in bytes, and when it last changed in Unix nanoseconds."""

    session_id: str
    path: Path
    bytes: int
    modified_ns: int


def scan(root: Path) -> Iterator[Seen]:
    """The Arrow files of all sessions below `root`; links are not followed, other names are passed over."""
    for folder in sorted(os.scandir(root), key=lambda item: item.name):
        if _names_a_session(folder.name) and folder.is_dir(follow_symlinks=False):
            try:
                yield from _files(folder)
            except OSError:  # one unreadable session must not keep the others from being served
                logger.exception("session %s cannot be read and is not listed", folder.name)


def _files(folder: os.DirEntry[str]) -> Iterator[Seen]:
    for item in sorted(os.scandir(folder), key=lambda item: item.name):
        if item.name.endswith(".arrow") and item.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                state = item.stat(follow_symlinks=False)
                yield Seen(folder.name, Path(item.path), state.st_size, state.st_mtime_ns)


def _names_a_session(name: str) -> bool:
    try:
        check_session_id(name)
    except ValueError:
        return False
    return True
