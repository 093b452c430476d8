"""Permissions of the files that commands and actors write."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)


def private_directory(path: Path) -> list[Path]:
    """Make a directory and its missing parents for this user alone, whatever the umask is; returns those it made."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(0o700, exist_ok=True)
    return missing


def warn_if_open(folder: Path) -> None:
    """Log a warning if every user of this machine can read a directory's files."""
    if (mode := stat.S_IMODE(folder.stat().st_mode)) & stat.S_IRWXO:
        message = "every user of this machine can read %s (mode %o); to make it private: chmod -R go= %s"
        logger.warning(message, folder, mode, folder)


def restrict(folder: Path) -> None:
    """Let new files and directories of this process have at most the permissions of `folder`.

    Where it is missing, they are for the user alone. Nobody else may ever write. This sets the process's umask: it is
    for actors and commands, not for a library's functions.
    """
    granted = stat.S_IMODE(folder.stat().st_mode) if folder.is_dir() else 0o700
    os.umask(0o022 | 0o077 & ~granted)
