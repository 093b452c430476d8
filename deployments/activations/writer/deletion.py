"""Deletion of a session: a crash on the way leaves no half of it behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from deployments.activations.files.locks import DELETED, directory


def begin_deletion(root: Path, session_id: str) -> Path | None:
    """Take a session away from those there are; None if it has no files.

    Args:
        root: The store's.
        session_id: The session; nothing writes to it meanwhile.

    Raises:
        OSError: The disk refuses; the session is then as it was.
    """
    folder, trash = root / session_id, root / f"{DELETED}{secrets.token_hex(8)}"
    if not folder.is_dir() or folder.is_symlink():
        return None
    folder.rename(trash)
    return trash


def finish_deletion(deletion: Path) -> None:
    """Remove the files of a session that was taken away, or what a crash left of it.

    Raises:
        OSError: The disk refuses; the next start of the store goes on.
    """
    with directory(deletion.parent) as top:
        os.fsync(top)
    with contextlib.suppress(FileNotFoundError):  # a store that starts beside this one removes it, too
        shutil.rmtree(deletion)
