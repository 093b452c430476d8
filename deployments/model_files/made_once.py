"""Directories that take long to create: created once, and complete if they exist."""

from __future__ import annotations

import fcntl
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from deployments.permissions import private_directory


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Create a directory if it is missing, in one process only, and never leave it incomplete.

    Args:
        directory: The directory's path.
        make: Fills an empty directory, which is then renamed to `directory`.

    Raises:
        OSError: The disk fails.
    """
    if directory.is_dir():
        return directory
    folder = directory.parent
    private_directory(folder)
    unfinished = folder / f".{directory.name}.part"
    with (folder / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, however this process ends
        if not directory.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
            unfinished.mkdir()
            unfinished.chmod(stat.S_IMODE(folder.stat().st_mode))  # independent of the umask
            try:
                make(unfinished)
                unfinished.rename(directory)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return directory
