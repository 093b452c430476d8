"""Limits on sessions, and their deletion. On the writer's thread."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from deployments.activations.facts import SessionName, StoreError
from deployments.activations.files.disk import DELETED, directory, scan
from deployments.activations.index.index import Index
from deployments.activations.limits import Retention
from deployments.activations.writer.pool import Pool

_REMOVALS = 4  # sessions whose files are removed at a time: a small one waits for no large one

logger = logging.getLogger(__name__)


class Retainer:
    """Keeps a store within its limits. Quotas and age never delete a session that is pinned or being written.

    `busy` gives the sessions that are being written by this process.
    """

    def __init__(self, root: Path, index: Index, pool: Pool, busy: Callable[[], Set[SessionName]]) -> None:
        self.limits = Retention()
        self._root, self._index, self._pool, self._busy = root, index, pool, busy
        self._removals = ThreadPoolExecutor(_REMOVALS, thread_name_prefix="activation-removal")
        self._used, self._until = Counter[SessionName](), 0.0  # bytes, and until when they are taken as right

    def grow(self, session: SessionName, size: int) -> None:
        """A session's files have so many bytes more."""
        self._used[session] += size

    def recount(self) -> None:
        """Count the bytes of files again at the next use."""
        self._until = 0.0

    def check(self, session: SessionName, size: int, most: int = 0) -> list[SessionName]:
        """The sessions to delete before a session gets `size` bytes more; StoreError if a quota refuses them.

        Nothing is deleted for a run that may get more than fits, `most` bytes from now on.
        """
        if not self.limits.has_quotas or not size:
            return []
        used, limit = self._sizes(), self.limits.max_session_bytes
        if limit is not None and used[session] + size > limit:
            what = "store in another session, delete this one, or raise max_session_bytes"
            raise StoreError(_full(f"quota of session {session.id}", used[session], limit, size, what))
        limit, total = self.limits.max_store_bytes, used.total()
        if limit is None or (missing := total + size - limit) <= 0:
            return []
        if self.limits.delete_oldest:
            deleted = self._oldest(session, missing, missing + max(0, most - size))
            if deleted is not None:
                return deleted
        what = "delete sessions that are not needed, or raise max_store_bytes"
        raise StoreError(_full("store's quota", total, limit, size, what))

    def make_room(self, session: SessionName, size: int, most: int = 0) -> None:
        """Delete the sessions that `check` names; OSError if the disk refuses that."""
        for old in self.check(session, size, most):
            if not self._is_as_known(old):
                continue  # another node has just written to it
            logger.warning("session %s is deleted: the store's quota is reached, and it is the oldest", old.folder)
            self.delete(old).add_done_callback(_log)

    def expire(self, now: float) -> list[SessionName]:
        """Delete the sessions whose last run is too old at a time in Unix seconds; what the disk refuses stays."""
        done = list[SessionName]()
        if (age := self.limits.max_session_age_s) is None:
            return done
        for session, last in self._deletable():  # each is looked at just before it is deleted
            if last >= now - age:
                break
            try:
                self.delete(session).add_done_callback(_log)
            except (OSError, StoreError):
                logger.exception("session %s cannot be deleted", session.folder)
                continue
            logger.warning("session %s was deleted: its last run was too old", session.folder)
            done.append(session)
        return done

    def delete(self, session: SessionName) -> Future[bool]:
        """Delete a session of which no run is open: it is none any more when this returns.

        Its files are removed in the background; after a crash, the next start goes on. The future is false if there was
        none. OSError or StoreError if the disk refuses; the session is then as it was.
        """
        self._pool.close(session)
        known = self._index.drop(session)
        try:
            trash = _put_aside(self._root, session)
        except OSError:
            self._index.look([session])
            raise
        self._used.pop(session, None)
        if trash:
            return self._removals.submit(remove_folder, trash)
        nothing = Future[bool]()
        nothing.set_result(known)
        return nothing

    def close(self) -> None:
        """Finish the deletions that have started."""
        self._removals.shutdown()

    def _sizes(self) -> Counter[SessionName]:
        """The bytes of each session's files: counted now and then, and what is written in between is added."""
        if (start := time.monotonic()) >= self._until:
            self._used = Counter(self._index.sizes(but=[segment.path for segment in self._pool.open]))
            for segment in self._pool.open:
                self._used[segment.session] += segment.size
            self._until = (end := time.monotonic()) + max(1.0, 100 * (end - start))
        return self._used

    def _oldest(self, session: SessionName, missing: int, most: int) -> list[SessionName] | None:
        """The oldest sessions that take `missing` bytes, for a run of a session: its owner's alone.

        None unless those that may go take `most` bytes.
        """
        sizes, oldest, size = self._sizes(), list[SessionName](), 0
        for other, _ in self._deletable():
            if other.owner == session.owner and other != session and sizes[other]:  # else the disk has nothing of it
                oldest += [other] if size < missing else []
                size += sizes[other]
                if size >= most:
                    return oldest
        return None

    def _deletable(self) -> Iterator[tuple[SessionName, float]]:
        """The sessions that may go by themselves, and the times of their last runs; the oldest first."""
        stay = self._busy() | self._index.pinned()
        for session, last in self._index.by_age():
            if session not in stay and self._is_as_known(session):
                yield session, last

    def _is_as_known(self, session: SessionName) -> bool:
        """Whether a session's files are as the index has them: else another node may be writing a run."""
        known = {segment.path for segment in self._pool.open}
        sizes = {file.path: file.bytes for file in self._index.files(session) if file.local}
        missed = list[str]()
        files = scan(self._root, missed, [session])
        return all(file.path in known or sizes.get(file.path) == file.bytes for file in files) and not missed


def _put_aside(root: Path, session: SessionName) -> Path | None:
    """Rename a session's directory, at once and whole; None where it has none."""
    folder, trash = root / session.folder, root / f"{DELETED}{secrets.token_hex(8)}"
    if not folder.is_dir() or folder.is_symlink():
        return None
    folder.rename(trash)
    return trash


def remove_folder(trash: Path) -> bool:
    """Remove a directory, in a process of its own: many files take no time from the thread that writes."""
    with directory(trash.parent) as top:
        os.fsync(top)
    done = subprocess.run(["rm", "-rf", "--", trash], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise OSError(errno.EIO, done.stderr.strip(), str(trash))
    return True


def _log(deletion: Future[bool]) -> None:
    """Nobody waits for it: the next start goes on with what is left."""
    if error := deletion.exception():
        logger.error("a session that was deleted has files left", exc_info=error)


def _full(quota: str, used: int, most: int, size: int, what: str) -> str:
    return f"The {quota} is reached: {used} of {most} bytes are used, and {size} more do not fit: {what}."
