"""Small files beside the sessions: written under another name first, so that each is whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from deployments.activations.shard import directory

_UNFINISHED = ".new-"


def found(root: Path, folder: str) -> Iterator[os.DirEntry[str]]:
    """The files of a folder, if it is there; links are not followed, and what a crash cut short is removed."""
    where = root / folder
    if not where.is_dir() or where.is_symlink():
        return
    for item in list(os.scandir(where)):
        if item.name.startswith(_UNFINISHED):
            with contextlib.suppress(OSError):
                os.unlink(item.path)  # it was never answered
        elif item.is_file(follow_symlinks=False):
            yield item


def write(root: Path, folder: str, name: str, data: bytes) -> float:
    """Write a file, or put another in its place; durable when it returns.

    Args:
        root: The store's directory, absolute and no link.
        folder: A folder there; made if it is missing.
        name: The file's.
        data: All of it.

    Returns:
        Its time of modification, in Unix seconds.

    Raises:
        OSError: The disk refuses.
    """
    unfinished = f"{_UNFINISHED}{name}"
    with directory(root) as top:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, dir_fd=top)
        os.fsync(top)
        with directory(folder, top) as place:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            try:
                with open(os.open(unfinished, flags, 0o666, dir_fd=place), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    modified = os.fstat(file.fileno()).st_mtime
                os.rename(unfinished, name, src_dir_fd=place, dst_dir_fd=place)
                os.fsync(place)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=place)
                raise
    return modified


def remove(root: Path, folder: str, name: str) -> None:
    """Remove a file; it is gone when this returns, also where it was not there.

    Raises:
        OSError: The disk refuses.
    """
    with directory(root) as top, directory(folder, top) as place:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=place)
        os.fsync(place)
