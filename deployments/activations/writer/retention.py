"""Limits on sessions: which are deleted, whether there is room for more, and the deletion itself."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from deployments.accounts import OPERATOR, Account
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import FileUpdate, StoreError, name_of
from deployments.activations.files.disk import DELETED, directory, scan_session
from deployments.activations.limits import Retention, SessionSize, first_of
from deployments.activations.state.nodes import node_of
from deployments.activations.state.owners import Owners
from deployments.activations.state.state import Pins
from deployments.activations.writer.pool import Pool

if TYPE_CHECKING:
    from deployments.activations.archive.archive import Archive
    from deployments.activations.state.nodes import Nodes

_PAGE = 100  # sessions whose owners are looked up at once
_REMOVALS = 4  # sessions whose files are removed at a time: a small one waits for no large one

logger = logging.getLogger(__name__)


class SessionManager:
    """Quotas, deletion, pins and owners of a store's sessions. On the writer's thread, except `retention` and `old`.

    Quotas and age never delete a session that is pinned or being written, also by another node. For an account, a
    session that it may not change does not exist.

    Args:
        root: The directory of the sessions.
        catalogue: Its runs and files.
        pool: Its open files.
        owners: Who owns which session; None on a node that is not the store's.
        archive: The bucket, if the store has one.
        nodes: The nodes with directories of their own, if any.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        pool: Pool,
        owners: Owners | None = None,
        archive: Archive | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        self.retention = Retention()
        self.busy: Callable[[], Set[str]] = frozenset
        self._root, self._catalogue, self._pool, self._pins = root, catalogue, pool, Pins(root)
        self._owners, self._archive, self._nodes = owners, archive, nodes
        self._removals = ThreadPoolExecutor(_REMOVALS, thread_name_prefix="activation-removal")
        self._used, self._total, self._until = Counter[str](), 0, 0.0  # bytes, and until when they are taken as right

    # ---- room

    def used(self) -> Counter[str]:
        """The bytes of each session's files: counted now and then, and what is written in between is added."""
        if (began := time.monotonic()) >= self._until:
            self._used = self._pool.sizes()
            self._total = self._used.total()
            self._until = (ended := time.monotonic()) + max(1.0, 100 * (ended - began))
        return self._used

    def grow(self, session_id: str, size: int) -> None:
        """A session's files have so many bytes more."""
        self._used[session_id] += size
        self._total += size

    def recount(self) -> None:
        """Count the bytes of files again at the next use."""
        self._until = 0.0

    def check(self, session_id: str, size: int, most: int = 0, stay: Set[str] = frozenset()) -> list[SessionSize]:
        """The sessions to delete before a session gets `size` bytes more; StoreError if a quota refuses.

        Nothing is deleted for a run that may get more than fits, `most` bytes from now on; sessions in `stay` are not.
        """
        limits = self.retention
        limit, used = limits.max_session_bytes, self.used()[session_id] if limits.has_quotas else 0
        if limit is not None and used + size > limit:
            what = "store in another session, delete this one, or raise max_session_bytes"
            raise StoreError(_full(f"quota of session {session_id}", used, limit, size, what))
        limit = limits.max_store_bytes
        if limit is None or (missing := self._total + size - limit) <= 0:
            return []
        if limits.delete_oldest:
            deleted = first_of(self._deletable_for(session_id, stay), missing, max(0, most - size))
            if deleted is not None:
                return deleted
        what = "delete sessions that are not needed, or raise max_store_bytes"
        raise StoreError(_full("store's quota", self._total, limit, size, what))

    def make_room(self, session_id: str, size: int, most: int = 0) -> None:
        """The same, and delete what has to be deleted; OSError if the disk refuses that."""
        if not self.retention.has_quotas or not size:
            return
        stay = set[str]()
        while changed := {one.id for one in self.check(session_id, size, most, stay) if not self._is_as_known(one.id)}:
            stay |= changed
        for session in self.check(session_id, size, most, stay):
            logger.warning("session %s is deleted: the store's quota is reached, and it is the oldest", session.id)
            self.delete(session.id, automatic=True).add_done_callback(_log)

    def _deletable_for(self, session_id: str, stay: Set[str]) -> Iterator[SessionSize]:
        """The sessions that may go for a run of a session, its owner's alone; the oldest last run first."""
        owner, known = self._owner_of(session_id), self._catalogue.by_age()
        sizes, stay = self.used(), {session_id} | stay | self.busy() | self._pins.names()
        while names := [name for name, _ in islice(known, _PAGE)]:
            owners = self._owners.owners_of(names) if self._owners else {}
            for name in names:
                if name not in stay and owners.get(name) == owner:
                    yield SessionSize(name, sizes[name])

    def _owner_of(self, session_id: str) -> str | None:
        record = self._owners.of(session_id) if self._owners else None
        return record.owner if record else None

    def _is_as_known(self, session_id: str) -> bool:
        """Whether the files of a session, of which no run is open here, are as is known."""
        known = self._pool.own | {f"{uri} {size}" for uri, size in self._catalogue.files(session_id).items()}
        files = [(seen.uri, seen.bytes) for seen in scan_session(self._root, session_id)]
        return all(uri in known or f"{uri} {size}" in known for uri, size in files)

    # ---- other nodes

    def note(self, key: str, notes: Sequence[FileUpdate], asked: Collection[str]) -> dict[str, str]:
        """List runs that another node's writer stored; which sessions of these and of `asked` get no more, and why."""
        gone = {deletion.session_id for deletion in self._nodes.deletions(key)} if key and self._nodes else set[str]()
        refused = {session_id: f"Session {session_id} is being deleted: send the request again." for session_id in gone}
        notes = [note for note in notes if note.session_id not in gone]
        for note in notes:
            if key:
                is_gone = self._archive and self._archive.has(note.file)
            else:  # the node may see this directory under another path
                path = self._root / unquote(name_of(note.file.uri))
                note = note._replace(file=note.file._replace(uri=path.as_uri()))
                if is_gone := not path.exists():
                    logger.warning("%s, which a node wrote, is gone: its session may have been deleted since", path)
            if not is_gone:
                self.grow(note.session_id, self._catalogue.add(note))
        for session_id in {note.session_id for note in notes} | set(asked) - gone:
            try:
                self.make_room(session_id, 1)
            except StoreError as error:
                refused[session_id] = str(error)
        return refused

    # ---- age

    def old(self, now: float) -> list[str]:
        """The sessions that may be too old by a time in Unix seconds, of which `expire` deletes those that are."""
        age = self.retention.max_session_age_s
        found = () if age is None else takewhile(lambda one: one[1] < now - age, self._catalogue.by_age())
        return [name for name, _ in found]

    def expire(self, session_id: str, now: float) -> bool:
        """Delete a session if its last run is too old by `now`; whether it did. On a disk error it stays."""
        age = self.retention.max_session_age_s
        if age is None or session_id in self.busy() | self._pins.names():
            return False
        try:
            last = self._catalogue.last_run(session_id)
            if last is not None and last < now - age and self._is_as_known(session_id):
                logger.warning("session %s is deleted: its last run is more than %g s old", session_id, age)
                self.delete(session_id, automatic=True).add_done_callback(_log)
                return True
        except OSError:
            logger.exception("session %s cannot be deleted", session_id)
        return False

    # ---- owners and pins

    def assign(self, session_id: str, account: Account) -> str:
        """Admit a request that records into a session, as `Owners.claim`."""
        assert self._owners is not None
        return self._owners.claim(session_id, account, lambda: self._pool.sizes().keys() | self.busy())

    def check_fence(self, session_id: str, fence: str | None) -> None:
        """Refuse a run of a session that was deleted since its request was admitted, as `Owners.check`."""
        if self._owners:
            self._owners.check(session_id, fence)

    def share(self, session_id: str, shared: bool, account: Account) -> bool:
        """Let everybody read a session, or no more: true when durable, false if there is none."""
        assert self._owners is not None
        if not (self._catalogue.knows(session_id) and self._may_change(session_id, account)):
            return False
        self._owners.share(session_id, shared)
        return True

    def pin(self, session_id: str, pinned: bool, account: Account = OPERATOR) -> bool:
        """Pin a session, or take its pin away; answered as `share`."""
        if not self._catalogue.knows(session_id) and (pinned or session_id not in self._pins):
            return False
        if not self._may_change(session_id, account):
            return False
        self._pins.set(session_id, pinned)
        return True

    def may_delete(self, session_id: str, account: Account) -> bool:
        """Whether an account may delete a session; RequestError if it is pinned."""
        if self._may_change(session_id, account):
            self._pins.check(session_id)
            return True
        return False

    def _may_change(self, session_id: str, account: Account) -> bool:
        return account.may_change(self._owner_of(session_id))

    # ---- deletion

    def delete(self, session_id: str, automatic: bool = False) -> Future[bool]:
        """Delete a session of which no run is open: it is none any more when this returns.

        Its files are removed in the background; after a crash, the next start goes on. The future is false if there was
        none. OSError if the disk refuses; the session is then as it was, or, with a bucket, perhaps gone at the next
        start. An `automatic` deletion leaves it on nodes that have a later run of it.
        """
        if self._archive:
            self._archive.check_deletes()
        self._pool.close(session_id)
        if self._nodes and self._catalogue.knows(session_id):
            record = self._owners.of(session_id) if self._owners else None
            last = self._catalogue.last_run(session_id) or 0.0 if automatic else None
            holding = {node_of(uri) for uri in self._catalogue.files(session_id)}
            self._nodes.begin_deletion(session_id, record.fence if record else None, last, holding)
        known = self._archive.delete(session_id) if self._archive else False
        trash = self._put_aside(session_id)
        known = self._catalogue.drop(session_id) or known
        self._total -= self._used.pop(session_id, 0)
        if self._owners:  # after the files: a crash between them leaves no session without its owner
            self._owners.forget(session_id)
        if trash:
            return self._removals.submit(remove_folder, trash)
        nothing = Future[bool]()
        nothing.set_result(known)
        return nothing

    def close(self) -> None:
        """Finish deletions that have begun."""
        self._removals.shutdown()

    def _put_aside(self, session_id: str) -> Path | None:
        """Rename a session's directory, at once and whole; None where it has none."""
        folder, trash = self._root / session_id, self._root / f"{DELETED}{secrets.token_hex(8)}"
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
