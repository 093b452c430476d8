"""Who may read what a process writes: its user alone, or whom the operator's directory lets in."""

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


def make_private(file: Path) -> None:
    """Take a file from all but its user, where it is this user's; links are not followed, a missing file is none."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return  # missing, a link, or somebody else's
    try:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
