"""Deletion of a session: a crash on the way leaves no half of it behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deployments.activations import marks
from deployments.activations.holding import DELETED
from deployments.activations.marks import ARROW, JOINED, Mark
from deployments.activations.objects import AnyRoot, ObjectFile, Place
from deployments.activations.shard import directory

_AT_ONCE = 16  # objects that are removed beside each other

Deletion = Path | ObjectFile
"""What a session became: a directory that is none any more, or an object that says which of its objects go."""


def begin_deletion(root: AnyRoot, session_id: str) -> Deletion | None:
    """Take a session away from those there are; None if it has no files.

    Args:
        root: The store's.
        session_id: The session; nothing writes to it meanwhile.

    Raises:
        OSError: The disk refuses; the session is then as it was.
    """
    if isinstance(root, Place):
        names = [info.base_name for info in root.below(session_id).infos() if info.base_name.endswith((ARROW, JOINED))]
        if not names:
            return None
        mark = root.file(f"{DELETED}{session_id}-{secrets.token_hex(8)}")
        Mark(names, session_id).write(mark)
        return mark
    folder, trash = root / session_id, root / f"{DELETED}{secrets.token_hex(8)}"
    if not folder.is_dir() or folder.is_symlink():
        return None
    folder.rename(trash)
    return trash


def finish_deletion(deletion: Deletion) -> None:
    """Remove the files of a session that was taken away, or what a crash left of it.

    In object storage only those that were there when it was: the session may have others since.

    Raises:
        OSError: The disk refuses; the next start of the store goes on, or in object storage its compactor.
        ValueError: The object does not say what is to go; the message names it.
    """
    if isinstance(deletion, ObjectFile):
        try:
            mark = marks.read(deletion)
        except FileNotFoundError:
            return  # somebody else has finished it
        remove_all(deletion.folder.below(mark.session), mark.objects)
        deletion.remove()
        return
    with directory(deletion.parent) as top:
        os.fsync(top)
    with contextlib.suppress(FileNotFoundError):  # a store that starts beside this one removes it, too
        shutil.rmtree(deletion)


def remove_all(folder: Place, names: Iterable[str]) -> None:
    """Remove objects; those that are not there are no error.

    Args:
        folder: Where they are.
        names: Theirs.

    Raises:
        OSError: The store refuses.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(ObjectFile.remove, map(folder.file, names)))
