"""Opens a directory of runs for the one process that keeps it, and repairs what a killed process left.

Only files that no process has locked are changed: writers of other nodes may use the same directory.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from deployments.activations.facts import SessionName, StoreError, explain
from deployments.activations.files.disk import DELETED, NEW, directory, locked, remove_unfinished, scan, take
from deployments.activations.segments.segment_writer import rewrite
from deployments.activations.segments.segments import DamagedError, RunBatches, is_sealed, whole_runs
from deployments.activations.segments.verify import read_all
from deployments.activations.writer.pool import FILE_NAME
from deployments.activations.writer.retention import remove_folder
from deployments.permissions import private_directory, warn_if_open

LOCK = ".lock"  # no session id starts with '.'
DAMAGED = ".damaged"  # after the name of a file that has more than a run that was cut short
_ENDING_S = 15.0  # for which a server that is ending is waited for
_OF_A_RUN = b'"messages_hash": '  # in the description of every run

logger = logging.getLogger(__name__)


def open_directory(root: Path) -> int:
    """Make a store's directory where it is missing, and lock it, by the descriptor that holds the lock.

    StoreError if another server keeps it, or the disk refuses.
    """
    try:
        missing = private_directory(root)
        root.mkdir(exist_ok=True)  # an error if it is a file
        warn_if_open(root)
        for folder in missing:
            with directory(folder.parent.resolve()) as above:
                os.fsync(above)
        until = time.monotonic() + _ENDING_S
        while True:
            try:
                lock = locked(root / LOCK)
                os.ftruncate(lock, 0)
                os.write(lock, f"process {os.getpid()} of {socket.gethostname()}".encode())
                return lock
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StoreError(
                        f"Another server ({(root / LOCK).read_text()}) uses the activation store at {root}: stop it, "
                        "or give this one another activations_dir."
                    ) from None
                time.sleep(0.1)
    except OSError as error:
        raise StoreError(f"{root}: {explain(root, error)}") from error


def recover(root: Path, sealed: Mapping[str, tuple[int, int]] = MappingProxyType({})) -> threading.Thread:
    """Seal the files of writers that were killed, after their last whole run, and remove what else they left.

    The thread that it returns removes deleted sessions. What the disk refuses is logged. `sealed` has files that are
    known to be sealed, by path their bytes and time of change in ns; those that are still so are not opened.
    """
    items = list(os.scandir(root))
    for item in items:
        if item.name.startswith(NEW):
            remove_unfinished(item)
    deleted = [item for item in items if item.name.startswith(DELETED) and item.is_dir(follow_symlinks=False)]
    seal_left(root, sealed)
    removal = threading.Thread(
        target=_remove_all, args=([Path(item.path) for item in deleted],), name="activation-removal", daemon=True
    )
    removal.start()
    return removal


def seal_left(
    root: Path,
    sealed: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    of: Collection[SessionName] | None = None,
) -> None:
    """Seal the files that no writer has open, of all sessions or some; `sealed` is as for `recover`."""
    for seen in scan(root, of=of):
        if sealed.get(seen.path) != (seen.bytes, seen.modified_ns) and FILE_NAME.fullmatch(seen.file.name):
            try:
                if not is_sealed(seen.file):
                    _recover_file(seen.file)
            except Exception:  # one bad file must not keep the store from starting
                logger.exception("%s could not be looked through or given a footer: it is left as it is", seen.file)


def _remove_all(folders: Sequence[Path]) -> None:
    for folder in folders:
        try:
            remove_folder(folder)
        except OSError:
            logger.exception("a session that was deleted has files left")


def _recover_file(path: Path) -> None:
    """Seal a file after its last whole run, or remove it where it has none."""
    with directory(path.parent) as folder:
        file = os.open(path.name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
        try:
            if not take(file) or is_sealed(path):
                return  # it is being written, or its writer came between
            read_all(path)  # a page that the disk cannot give must not pass for the end of the runs
            whole = list(whole_runs(path))
            runs = [run for run in whole if _is_intact(run)]
            size, end = os.fstat(file).st_size, whole[-1].offset + whole[-1].bytes if whole else 0
            # Without power, disks lose what was not synced, and in any order.
            if len(runs) < len(whole) or _has_run(file, end, size):
                kept = path.with_name(f"{path.name}{DAMAGED}")
                with contextlib.suppress(FileExistsError):  # a start that was cut off made it
                    os.link(path, kept)
                logger.error("%s is damaged: all that it holds is kept as %s", path, kept)
            if runs:
                batches = (batch for run in runs for batch in run.batches)
                rewrite(path, runs[0].batches[0].schema, batches, path.parents[2])
                if end < size:  # else its writer ended without sealing it, and nothing is lost
                    logger.warning("%s was sealed after its last whole run, at byte %d of %d", path, end, size)
            else:
                os.unlink(path.name, dir_fd=folder)
                os.fsync(folder)
                logger.warning("%s was removed: its writer was killed before a run in it was whole", path)
        finally:
            os.close(file)


def _is_intact(run: RunBatches) -> bool:
    with contextlib.suppress(DamagedError):
        return not run.damage()
    return False


def _has_run(file: int, begin: int, end: int) -> bool:
    """Whether these bytes of a file, which no whole run has, hold the description of a run that was whole."""
    if begin >= end:
        return False
    with mmap.mmap(file, end, access=mmap.ACCESS_READ) as mapped:
        return mapped.find(_OF_A_RUN, begin) >= 0
