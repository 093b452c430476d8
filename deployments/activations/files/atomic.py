"""Small files beside the sessions: written under another name first, so that each is whole or not there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from deployments.activations.files.locks import NEW, create, directory, take


def found(root: Path, folder: str) -> Iterator[os.DirEntry[str]]:
    """The files of a folder, if it is there; links are not followed, and what a crash cut short is removed."""
    where = root / folder
    if not where.is_dir() or where.is_symlink():
        return
    for item in list(os.scandir(where)):
        if item.name.startswith(NEW):
            remove_unfinished(item)
        elif item.is_file(follow_symlinks=False):
            yield item


def remove_unfinished(item: os.DirEntry[str]) -> None:
    """Remove a file that was never answered, unless somebody is writing it."""
    with contextlib.suppress(OSError):
        if item.is_file(follow_symlinks=False):
            file = os.open(item.path, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                if take(file):
                    os.unlink(item.path)
            finally:
                os.close(file)


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
    unfinished = f"{NEW}{secrets.token_hex(8)}-{name}"
    with directory(root) as top:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, dir_fd=top)
        os.fsync(top)
        with directory(folder, top) as place:
            try:
                with open(create(unfinished, place), "wb") as file:
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
