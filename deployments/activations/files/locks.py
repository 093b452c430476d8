"""Files that are held while they are written, so that a store that starts can tell them from what a crash left.

A file is held by an exclusive `flock`, on this machine or, over a shared file system, on any. The kernel lets go of it
when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

# What begins so is on its way into the store or out of it. No session id begins with '.'.
NEW = ".new-"  # a file that gets its name once it is whole
PULLED = ".pull-"  # a directory that does
DELETED = ".deleted-"  # a session's directory


def create(name: str, folder: int) -> int:
    """Create a file that did not exist, and hold it: the descriptor, for writing.

    Args:
        name: The file's, in its folder.
        folder: The folder's descriptor.

    Raises:
        OSError: The disk refuses, or the name is taken.
    """
    while True:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return file
        except OSError:
            os.close(file)
            raise
        os.close(file)  # a store that starts came between, and removed it for a leftover


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a directory, where the file system lets directories be held: over NFS they cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def take(descriptor: int) -> bool:
    """Hold what a crash left; false where another process holds it, or has removed it.

    Raises:
        OSError: The file system has no such locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


@contextlib.contextmanager
def directory(path: str | Path, parent: int | None = None) -> Iterator[int]:
    """The descriptor of a directory that is not a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def locked(path: Path, make: bool = True) -> int:
    """The descriptor of a file that this process alone holds, until it is closed.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: The disk refuses, or has no such locks.
    """
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if make else 0), 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise BlockingIOError(error.errno, "another process keeps it", str(path)) from error
    except OSError:
        os.close(lock)
        raise
    return lock
