"""Directories that take long to make: made once, and complete if they exist."""

from __future__ import annotations

import fcntl
import shutil
import stat
from collections.abc import Callable
from pathlib import Path


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """A directory that is made if it is missing, by one process only, and never left incomplete.

    Args:
        directory: Where it will be.
        make: Fills the empty directory that it gets; this is renamed to `directory` when it is complete.

    Raises:
        OSError: The disk refuses.
    """
    if directory.is_dir():
        return directory
    folder = directory.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = folder / f".{directory.name}.part"
    with (folder / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, however this process ends
        if not directory.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)  # of one that was killed
            unfinished.mkdir()
            unfinished.chmod(stat.S_IMODE(folder.stat().st_mode))  # whatever the umask
            try:
                make(unfinished)
                unfinished.rename(directory)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return directory
