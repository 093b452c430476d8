"""Opens a directory of runs for the one process that writes it, and repairs what a killed process left.

Only files that no process has locked are changed: writers of other nodes may use the same directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa

from deployments.activations.catalogue.database import can_hold, sealed_files
from deployments.activations.facts import FileUpdate, StoredFile, StoreError, names_a_session
from deployments.activations.files.disk import DELETED, NEW, PULLED, directory, files_of, remove_unfinished, take, write
from deployments.activations.files.machines import Heartbeat
from deployments.activations.files.places import DamagedError
from deployments.activations.segments.batches import ends_cut
from deployments.activations.segments.checksums import damaged
from deployments.activations.segments.segment_writer import seal
from deployments.activations.segments.segments import WholeRun, is_sealed, whole_runs
from deployments.activations.segments.verify import read_all
from deployments.activations.writer.pool import FILE_NAME
from deployments.activations.writer.retention import remove_folder

MARK = ".store-id"  # no session id begins with '.'
DAMAGED = ".damaged-"  # after the name of the file that it was part of
_ENDING_S = 15.0  # for which a server that is ending is waited for
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW

logger = logging.getLogger(__name__)


def open_directory(root: Path) -> tuple[str, Heartbeat]:
    """Make a directory and put right what a killed process left in it; StoreError if another process writes there.

    Returns the directory's `mark`, and what shows other machines that this one writes there.
    """
    make_root(root)
    _check_alone(root)
    heartbeat = Heartbeat(root)
    recover(root, sealed_files(root))
    return mark(root), heartbeat


def mark(root: Path) -> str:
    """What tells a store's directory from any other, also from another node; no node finds one that cannot be kept."""
    try:
        if not (root / MARK).exists():
            write(root, ".", MARK, secrets.token_hex(16).encode())
        return (root / MARK).read_text()
    except OSError:
        logger.exception("%s cannot be marked: no other node finds it", root)
        return secrets.token_hex(16)


def _check_alone(root: Path) -> None:
    """Raise StoreError where another server's store keeps a directory; one that is ending is waited for."""
    until = time.monotonic() + _ENDING_S
    with contextlib.suppress(OSError):  # there are no locks, as the catalogue says
        while not can_hold(root):
            if time.monotonic() > until:
                raise StoreError(
                    f"Another server or node uses the activation store at {root}: stop it, or give this one another "
                    "activations_dir."
                )
            time.sleep(0.1)


def make_root(root: Path) -> None:
    """Make a store's directory where it is missing; durable when this returns."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with directory(folder.parent.resolve()) as above:
            os.fsync(above)


def recover(root: Path, sealed: Mapping[str, tuple[int, int]] = MappingProxyType({})) -> threading.Thread:
    """Seal the files of writers that were killed, after their last whole run, and remove what else they left.

    The thread that it returns removes deleted sessions. What the disk refuses is logged. `sealed` has files that are
    known to be sealed, by URI their bytes and time of change in ns; those that are still so are not opened.
    """
    trash = list[Path]()  # of deletions that were cut short
    for item in list(os.scandir(root)):
        if item.name.startswith(NEW):
            remove_unfinished(item)
        elif not item.is_dir(follow_symlinks=False):
            continue
        elif item.name.startswith(DELETED):
            trash.append(Path(item.path))
        elif item.name.startswith(PULLED):
            with contextlib.suppress(OSError), directory(item.path) as folder:
                if take(folder):  # a download that was cut short
                    shutil.rmtree(item.path, ignore_errors=True)
        elif names_a_session(item.name):
            try:
                _recover_session(Path(item.path), sealed)
            except OSError:
                logger.exception("session %s cannot be looked through", item.name)
    removal = threading.Thread(target=_remove_all, args=(trash,), name="activation-removal", daemon=True)
    removal.start()
    return removal


def _remove_all(folders: Sequence[Path]) -> None:
    for folder in folders:
        try:
            remove_folder(folder)
        except OSError:
            logger.exception("a session that was deleted has files left")


def _recover_session(path: Path, sealed: Mapping[str, tuple[int, int]]) -> None:
    with directory(path) as folder:
        for seen in files_of(path):
            is_known = sealed.get(seen.uri) == (seen.bytes, seen.modified_ns)
            try:
                if not is_known and FILE_NAME.fullmatch(seen.file.name) and not is_sealed(seen.file):
                    _recover_file(seen.file, folder)
            except Exception:  # one bad file must not keep the store from starting
                logger.exception("%s could not be looked through or given a footer: it is left as it is", seen.file)


def _recover_file(path: Path, folder: int) -> None:
    """Seal a file after its last whole run, or remove it where it has none."""
    file = os.open(path.name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
    try:
        if not take(file):
            return  # it is being written
        read_all(path)  # a page that the disk cannot give must not pass for the end of the runs
        if is_sealed(path):
            return  # its writer came between
        size, end, schema = os.fstat(file).st_size, 0, None
        for run in whole_runs(path):
            # Without power, disks lose what was not synced, and in any order.
            if not _changed(run):
                end, schema = run.offset + run.bytes, run.batches[0].schema
        if size > end and not ends_cut(path, end):
            _set_aside(path, folder, end)
        if schema is None:
            os.unlink(path.name, dir_fd=folder)
            os.fsync(folder)
            logger.warning("%s was removed: its writer was killed before a run in it was whole", path)
            return
        _seal(file, path, schema, end)
        logger.warning("%s was sealed after its last whole run: %d bytes after it were cut off", path, size - end)
    finally:
        os.close(file)


def seal_left(path: Path, known: Collection[str]) -> FileUpdate | None:
    """Seal a session's file that nobody writes any more, as `recover`; the file and its runs whose ids are not `known`.

    None where it is being written, or gone. OSError or ArrowException if it cannot be sealed.
    """
    try:
        with directory(path.parent) as folder:
            _recover_file(path, folder)
        if not is_sealed(path):
            return None
        state, entries = path.stat(), [run.entry(path.as_uri()) for run in whole_runs(path)]
    except FileNotFoundError:
        return None
    rows = sum(entry.rows for entry in entries)
    file = StoredFile(path.as_uri(), state.st_size, True, rows, state.st_mtime_ns)
    return FileUpdate(path.parent.name, [entry for entry in entries if entry.facts.run_id not in known], file)


def _changed(run: WholeRun) -> bool:
    if not run.intact:
        return True
    try:
        return any(damaged(batch.select(), sums) for batch, sums in zip(run.batches, run.sums, strict=True))
    except DamagedError:
        return True


def _set_aside(path: Path, folder: int, offset: int) -> None:
    """Copy what is after a place, and is more than a run that was cut off, before it goes."""
    name = f"{path.name}{DAMAGED}{offset}"
    with path.open("rb") as source, open(os.open(name, _NEW, 0o666, dir_fd=folder), "wb") as copy:
        source.seek(offset)
        shutil.copyfileobj(source, copy, 1 << 20)
        copy.flush()
        os.fsync(copy.fileno())
    os.fsync(folder)
    logger.error("%s is damaged after byte %d; what is there was copied to %s", path, offset, name)


def _seal(file: int, path: Path, schema: pa.Schema, end: int) -> None:
    os.truncate(file, end)
    try:
        seal(file, path, schema, end)
        os.fsync(file)
    except (OSError, pa.ArrowException):
        with contextlib.suppress(OSError):
            os.truncate(file, end)  # half a footer is none
        raise
