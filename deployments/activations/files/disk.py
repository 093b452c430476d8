"""Directories and files on a store's disk: listing, locking, and atomic writes of small files.

A file that is being written has an exclusive `flock`, which holds on this machine or, on a shared file system, on all
machines. A store that starts can so tell such a file from one that a crash left. The kernel releases the lock when the
process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from deployments.activations.facts import names_a_session

# Prefixes of names that are being added or removed. No session id begins with '.'.
NEW = ".new-"  # a file that gets its name once it is whole
PULLED = ".pull-"  # a directory that does
DELETED = ".deleted-"  # a session's directory

logger = logging.getLogger(__name__)


def create(name: str, folder: int) -> int:
    """Create and hold a file that did not exist in a folder, by its descriptor: a descriptor for writing."""
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
    with directory(folder) as descriptor:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def take(descriptor: int) -> bool:
    """Hold what a crash left; false where another process holds it, or has removed it."""
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
    """The descriptor of a file that this process alone holds; BlockingIOError if another process does."""
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if make else 0), 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise BlockingIOError(error.errno, "another process keeps it", str(path)) from error
        raise
    return lock


def remove_unfinished(item: os.DirEntry[str]) -> None:
    """Remove a file that was never answered, unless a process is writing it."""
    with contextlib.suppress(OSError):
        if item.is_file(follow_symlinks=False):
            file = os.open(item.path, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                if take(file):
                    os.unlink(item.path)
            finally:
                os.close(file)


def write(root: Path, folder: str, name: str, data: bytes) -> float:
    """Write a file in a folder of `root`, which is made; durable when it returns the time of modification."""
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


class Mount:
    """A root that was a mount point when the store began must be one: else files come to lie below it, out of sight."""

    def __init__(self, root: Path) -> None:
        self._root, self._mounted = root, os.path.ismount(root)

    def check(self) -> None:
        """Raise FileNotFoundError where the disk is gone."""
        if self._mounted and not os.path.ismount(self._root):
            raise FileNotFoundError(errno.ENOENT, "nothing is mounted there any more", str(self._root))


class SessionFile(NamedTuple):
    """A file of a session: its length in bytes, and when it last changed in Unix nanoseconds."""

    session_id: str
    file: Path
    bytes: int
    modified_ns: int

    @property
    def uri(self) -> str:
        """Its URI."""
        return self.file.as_uri()


def scan(root: Path, missed: list[str] | None = None, of: Collection[str] | None = None) -> Iterator[SessionFile]:
    """The Arrow files of all sessions below `root`, or those `of` some; links are not followed.

    `missed` collects what cannot be read.
    """
    for folder in sorted(os.scandir(root), key=lambda item: item.name):
        is_one = names_a_session(folder.name) if of is None else folder.name in of
        if is_one and folder.is_dir(follow_symlinks=False):
            try:
                yield from files_of(Path(folder.path))
            except OSError:  # one unreadable session must not keep the others from being served
                logger.exception("session %s cannot be read and is not listed", folder.name)
                if missed is not None:
                    missed.append(folder.name)


def scan_session(root: Path, session_id: str) -> Iterator[SessionFile]:
    """The same of one session; nothing where it has no directory. OSError if it cannot be read."""
    if (root / session_id).is_dir():
        yield from files_of(root / session_id)


def files_of(folder: Path) -> Iterator[SessionFile]:
    """The Arrow files of one directory, by their names. OSError if it cannot be read."""
    for item in sorted(os.scandir(folder), key=lambda item: item.name):
        if item.name.endswith(".arrow") and item.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                state = item.stat(follow_symlinks=False)
                yield SessionFile(folder.name, Path(item.path), state.st_size, state.st_mtime_ns)
