"""Limits on sessions: which are deleted, whether there is room for more, and the deletion itself."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from deployments.accounts import OPERATOR, Account
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import FileUpdate, StoreError, name_of
from deployments.activations.files.disk import DELETED, directory, scan_session
from deployments.activations.limits import Retention, SessionSize, oldest
from deployments.activations.state.nodes import node_of
from deployments.activations.state.owners import Owners
from deployments.activations.state.state import Pins
from deployments.activations.writer.pool import Pool

if TYPE_CHECKING:
    from deployments.activations.archive.archive import Archive
    from deployments.activations.state.nodes import Nodes

_REMOVALS = 4  # sessions whose files are removed at a time: a small one waits for no large one

logger = logging.getLogger(__name__)


class Room(NamedTuple):
    """Bytes that are `missing` in a full store for a session, whose run may yet get `more` than that.

    Sessions in `stay` are not deleted for them; `own` are the writer's open files by URI.
    """

    session_id: str
    missing: int
    more: int
    stay: Set[str]
    own: Set[str]
    full: StoreError  # what is said where deletions do not suffice


class SessionManager:
    """Quotas, deletion, pins and owners of a store's sessions.

    On the writer's thread, except `retention`, `old` and `deletable`: nothing else takes longer the more sessions there
    are, but for the sum of an owner's sessions after each `recount`. Quotas and age never delete a session that is
    pinned or being written, also by another node. For an account, a session that it may not change does not exist.

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
        self._owned: dict[str | None, int] = {}  # the bytes of an owner, whose sum takes long

    def __contains__(self, session_id: object) -> bool:
        """Whether a session has files, or is about to."""
        return self._catalogue.size(str(session_id)) > 0 or session_id in self.busy()

    # ---- room

    def used(self, *session_ids: str) -> int:
        """The bytes of the files of these sessions, or of all."""
        return self._catalogue.size(*session_ids) + self._pool.unlisted(*session_ids)

    def grow(self, session_id: str, size: int) -> None:
        """A session's files have so many bytes more."""
        if self._owned and (owner := self._owner(session_id)) in self._owned:
            self._owned[owner] += size

    def recount(self) -> None:
        """Count the bytes of owners again at the next use."""
        self._owned.clear()

    def check(self, session_id: str, size: int, most: int = 0) -> Room | None:
        """What has to be made free before a session gets `size` bytes more; StoreError if a quota refuses.

        A run may get more than fits: `most` bytes from now on.
        """
        limits = self.retention
        if not (limits.has_quotas and size):
            return None
        limit = limits.max_session_bytes
        if limit is not None and (used := self.used(session_id)) + size > limit:
            what = "store in another session, delete this one, or raise max_session_bytes"
            raise _full(f"quota of session {session_id}", used, limit, size, what)
        self._check_owner(session_id, size)
        limit = limits.max_store_bytes
        if limit is None or (missing := (used := self.used()) + size - limit) <= 0:
            return None
        what = "delete sessions that are not needed, or raise max_store_bytes"
        full = _full("store's quota", used, limit, size, what)
        if not limits.delete_oldest:
            raise full
        return Room(session_id, missing, max(0, most - size), frozenset(self.busy()), self._pool.own, full)

    def deletable(self, room: Room) -> list[SessionSize]:
        """The sessions to delete for one, of its owner, the oldest first; StoreError where all are not enough."""
        found, free, owner = list[SessionSize](), 0, self._owner(room.session_id)
        stay = {room.session_id} | room.stay | self._pins.names()
        for session in self._catalogue.by_age():
            is_owners = session.id not in stay and self._owner(session.id) == owner
            if is_owners and self._is_as_known(session.id, room.own):
                found.append(session)
                free += session.bytes
                if free >= room.missing + room.more:
                    return oldest(found, room.missing)
        raise room.full

    def _owner(self, session_id: str) -> str | None:
        record = self._owners.of(session_id) if self._owners else None
        return record.owner if record else None

    def _check_owner(self, session_id: str, size: int) -> None:
        limit = self.retention.max_owner_bytes
        if self._owners is None or limit is None or not (record := self._owners.of(session_id)) or not record.limited:
            return
        if (used := self._owned.get(record.owner)) is None:
            used = self._owned[record.owner] = self.used(*self._owners.limited(record.owner))
        if used + size > limit:
            what = "delete sessions that are not needed, or raise max_owner_bytes"
            raise _full(f"quota of {record.owner}", used, limit, size, what)

    def _is_as_known(self, session_id: str, own: Set[str]) -> bool:
        """Whether the files of a session, of which no run is open here, are as is known; `own` are open here."""
        files = [(seen.uri, seen.bytes) for seen in scan_session(self._root, session_id)]
        known = self._catalogue.files(session_id) if files else {}
        return all(uri in own or known.get(uri) == size for uri, size in files)

    # ---- other nodes

    def note(self, key: str, notes: Sequence[FileUpdate]) -> dict[str, str]:
        """List runs that another node's writer stored; which sessions get no more runs there now, and why."""
        gone = {deletion.session_id for deletion in self._nodes.deletions(key)} if key and self._nodes else set[str]()
        for note in notes:
            if note.session_id in gone:
                continue
            if key:
                is_gone = self._archive and self._archive.has(note.file)
            else:  # the node may see this directory under another path
                path = self._root / unquote(name_of(note.file.uri))
                note = note._replace(file=note.file._replace(uri=path.as_uri()))
                if is_gone := not path.exists():
                    logger.warning("%s, which a node wrote, is gone: its session may have been deleted since", path)
            if not is_gone:
                self.grow(note.session_id, self._catalogue.add(note))
        return {session_id: f"Session {session_id} is being deleted: send the request again." for session_id in gone}

    # ---- age

    def old(self, now: float) -> Iterator[SessionSize]:
        """The sessions that are too old by a time in Unix seconds, unless something keeps them from `expire`."""
        age = self.retention.max_session_age_s
        return iter(()) if age is None else self._catalogue.by_age(now - age)

    def expire(self, session: SessionSize, why: str) -> bool:
        """Delete a session unless it is pinned or has changed since; whether it did. On a disk error it stays."""
        if session.id in self.busy() or session.id in self._pins:
            return False
        try:
            last = self._catalogue.last_run(session.id)
            if last is not None and last <= session.last and self._is_as_known(session.id, self._pool.own):
                logger.warning("session %s is deleted: %s", session.id, why)
                self.delete(session.id, automatic=True).add_done_callback(_log)
                return True
        except OSError:
            logger.exception("session %s cannot be deleted", session.id)
        return False

    # ---- owners and pins

    def assign(self, session_id: str, account: Account) -> str:
        """Admit a request that records into a session, as `Owners.claim`."""
        assert self._owners is not None
        most = self.retention.max_owner_sessions
        return self._owners.claim(session_id, account, lambda: self, most)

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
        record = self._owners.of(session_id) if self._owners else None
        return account.may_change(record and record.owner)

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
        freed = self.used(session_id)
        if self._nodes and self._catalogue.knows(session_id):
            record = self._owners.of(session_id) if self._owners else None
            last = self._catalogue.last_run(session_id) if automatic else None
            holding = {node_of(uri) for uri in self._catalogue.files(session_id)}
            self._nodes.begin_deletion(session_id, record.fence if record else None, last, holding)
        known = self._archive.delete(session_id) if self._archive else False
        trash = self._put_aside(session_id)
        known = self._catalogue.drop(session_id) or known
        self.grow(session_id, -freed)
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


def _full(quota: str, used: int, most: int, size: int, what: str) -> StoreError:
    return StoreError(f"The {quota} is reached: {used} of {most} bytes are used, and {size} more do not fit: {what}.")
