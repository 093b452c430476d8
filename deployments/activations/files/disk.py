"""Directories and files on a store's disk: listing, locking, atomic writes of small files, and whether there is room.

A file that is being written has an exclusive `flock`, which holds on all machines of a shared file system. A store that
starts can so tell it from one that a crash left. The kernel releases the lock when the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from deployments.activations.facts import SessionName, explained, names_a_session

# Prefixes of names that are being added or removed. No session id starts with '.'.
NEW = ".new-"  # a file that gets its name once it is whole
DELETED = ".deleted-"  # a session's directory
PIN = ".pinned"  # in a session's directory
_EVERY_S = 1.0  # a disk is tried so often at most, however many ask

logger = logging.getLogger(__name__)


def create(name: str, folder: int) -> int:
    """Create and lock a file that did not exist in a folder, by its descriptor: a descriptor for writing."""
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        os.close(file)
        os.unlink(name, dir_fd=folder)
        raise
    return file


def take(descriptor: int) -> bool:
    """Lock what a crash left; false where another process has locked or removed it."""
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


def locked(path: Path) -> int:
    """The descriptor of a file that this process alone has locked; BlockingIOError if another process has."""
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
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


def write(root: Path, folder: str, name: str, pieces: Iterable[bytes]) -> os.stat_result:
    """Write a file in a folder of `root`, which is made; durable when it returns what the file then is."""
    unfinished = f"{NEW}{secrets.token_hex(8)}-{name}"
    with directory(root) as top:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, dir_fd=top)
        os.fsync(top)
        with directory(folder, top) as place:
            try:
                with open(create(unfinished, place), "wb") as file:
                    file.writelines(pieces)
                    file.flush()
                    os.fsync(file.fileno())
                    state = os.fstat(file.fileno())
                    os.rename(unfinished, name, src_dir_fd=place, dst_dir_fd=place)
                os.fsync(place)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=place)
                raise
    return state


def set_pin(root: Path, session: SessionName, pinned: bool) -> None:
    """Pin a session that has a run, or take its pin away; durable when it returns. StoreError if the disk refuses."""
    with explained(root):
        if pinned:
            (root / session.folder).parent.mkdir(exist_ok=True)  # the bucket alone may have its files
            write(root, session.folder, PIN, [])
            return
        with contextlib.suppress(FileNotFoundError), directory(root / session.folder) as folder:
            os.unlink(PIN, dir_fd=folder)
            os.fsync(folder)


class SessionFile(NamedTuple):
    """A file of a session: its length in bytes, and when it last changed in Unix nanoseconds."""

    session: SessionName
    file: Path
    bytes: int
    modified_ns: int

    @property
    def path(self) -> str:
        """Its path below the store's directory."""
        return f"{self.session.folder}/{self.file.name}"


def sessions(root: Path, missed: list[str] | None = None) -> Iterator[SessionName]:
    """All sessions with a directory below `root`; links are not followed. `missed` collects what cannot be read."""
    for owner in sorted(os.scandir(root), key=lambda item: item.name):
        if not (_is_folder(owner) and names_a_session(owner.name)):  # an owner's is such a name, too
            continue
        try:
            names = sorted(item.name for item in os.scandir(owner.path) if _is_folder(item))
        except OSError:  # an unreadable directory must not keep the others from being served
            logger.exception("%s cannot be read and is not listed", owner.path)
            if missed is not None:
                missed.append(owner.name)
            continue
        yield from (SessionName.of_folder(f"{owner.name}/{name}") for name in names if names_a_session(name))


def scan(
    root: Path, missed: list[str] | None = None, of: Collection[SessionName] | None = None
) -> Iterator[SessionFile]:
    """The Arrow files of all sessions below `root`, or those `of` some; links are not followed.

    `missed` collects what cannot be read.
    """
    for session in sessions(root, missed) if of is None else sorted(of, key=lambda session: session.folder):
        try:
            items = sorted(os.scandir(root / session.folder), key=lambda item: item.name)
        except FileNotFoundError:
            continue
        except OSError:
            logger.exception("session %s cannot be read and is not listed", session.folder)
            if missed is not None:
                missed.append(session.folder)
            continue
        for item in items:
            if item.name.endswith(".arrow") and item.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                    state = item.stat(follow_symlinks=False)
                    yield SessionFile(session, Path(item.path), state.st_size, state.st_mtime_ns)


def _is_folder(item: os.DirEntry[str]) -> bool:
    return item.is_dir(follow_symlinks=False)


class DiskCheck:
    """Tries the disk of a store's directory, absolute and no link."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="room")  # one tries it at a time, however long it takes
        self._tried = -_EVERY_S
        self._failed: OSError | None = None

    async def check(self, size: int) -> None:
        """Raise StoreError if so many bytes cannot be written now; the message has the reason and what to do."""
        with explained(self._root):
            await asyncio.get_running_loop().run_in_executor(self._pool, self._check, size)

    def _check(self, size: int) -> None:
        if time.monotonic() - self._tried >= _EVERY_S:
            self._failed = None
            try:
                with tempfile.TemporaryFile(dir=self._root, prefix=NEW, buffering=0) as file:
                    file.write(b"\0")
                    os.fsync(file.fileno())
            except OSError as error:
                self._failed = error
            self._tried = time.monotonic()
        if self._failed:
            raise self._failed.with_traceback(None)
        disk = os.statvfs(self._root)
        if size > (free := disk.f_bavail * disk.f_frsize):
            raise OSError(errno.ENOSPC, f"{free} bytes are free, and up to {size} may be recorded")
