"""Permissions of the files that commands and actors write."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def restrict(folder: Path) -> None:
    """Let new files and directories of this process have at most the permissions of `folder`.

    Where it is missing, they are for the user alone. Nobody else may ever write. This sets the process's umask: it is
    for actors and commands, not for a library's functions.
    """
    granted = stat.S_IMODE(folder.stat().st_mode) if folder.is_dir() else 0o700
    os.umask(0o022 | 0o077 & ~granted)
