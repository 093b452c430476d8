"""Which session is whose: of each session that has an owner a file `<root>/.owners/<session_id>`.

The files are the truth: no rebuild of the catalogue touches them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Set
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from deployments.activations.accounts import Account
from deployments.activations.facts import StoreError, check_session_id, names_a_session
from deployments.activations.small_files import found, remove, write
from deployments.errors import RequestError

FOLDER = ".owners"  # no session id begins with '.'
NOT_YOURS = "session_not_yours"
_EMPTY_S = 3600.0  # after which a session that was claimed, and never got a run, may go
_AUTOMATIC = re.compile(r"auto-\d{4}-\d\d-\d\d-(.+)")  # the session of the day of the owner that it names

logger = logging.getLogger(__name__)


class Record(NamedTuple):
    """Whose a session is.

    Attributes:
        owner: The owner; None where an admin has shared a session that has none.
        shared: Whether everybody may read it.
        limited: Whether the owner's quotas count it.
        fence: Random; what a request that records shows of the session it was admitted to. A session that is deleted
            and claimed again has another one, so that no late run of the first becomes part of the second.
        claimed: When it was claimed, in Unix seconds.
    """

    owner: str | None
    shared: bool = False
    limited: bool = False
    fence: str = ""
    claimed: float = 0.0


_UNREADABLE = Record("")  # nobody has this name: admins alone may read the session


class Owners:
    """The owners of one root's sessions. Safe to use from several threads; calls may wait for the disk.

    Another server on the same directory may claim sessions, too: what is not known here is looked for on the disk.

    Args:
        root: The store's, absolute and no link.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root
        self._lock = RLock()
        self._records: dict[str, Record] = {}
        self._marks: dict[str, tuple[int, int]] = {}  # which file each record was read from, and when that changed
        self._looked: int | None = None  # the folder's time of modification when it was looked through
        self._sessions: defaultdict[str | None, set[str]] = defaultdict(set)  # by owner
        self.look()

    def look(self) -> None:
        """Learn of sessions that others have claimed or deleted.

        Raises:
            OSError: The disk refuses.
        """
        changed = self._mark("")
        if changed is not None and changed[1] == self._looked:
            return
        names = {item.name for item in found(self._folder, FOLDER) if names_a_session(item.name)}
        with self._lock:
            for name in names ^ self._records.keys():
                self._keep(name, self._read(name))  # it may have changed since the names were read
            self._looked = changed[1] if changed else None

    def of(self, session_id: str) -> Record | None:
        """Whose a session is; None where it has no owner.

        Raises:
            OSError: The disk refuses.
        """
        if not names_a_session(session_id):
            return None
        with self._lock:
            mark = self._mark(session_id)
            if mark is None:
                self._keep(session_id, None)
            elif mark != self._marks.get(session_id):
                self._keep(session_id, self._read(session_id))
                self._marks[session_id] = mark
            return self._records.get(session_id)

    def all(self) -> dict[str, Record]:
        """The records that are known here."""
        with self._lock:
            return dict(self._records)

    def limited(self, owner: str | None) -> set[str]:
        """The sessions that count for an owner's quotas."""
        with self._lock:
            return {name for name in self._sessions[owner] if self._records[name].limited}

    def readable(self, account: Account) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """The sessions that an account may read: these alone, None for all; and of those not these."""
        if account.is_admin:
            return None, ()
        readable, others = list[str](), list[str]()
        with self._lock:
            for name, record in self._records.items():
                (readable if account.may_read(record.owner, record.shared) else others).append(name)
        return (None, tuple(others)) if account.reads_unowned else (tuple(readable), ())

    def claim(self, session_id: str, account: Account, there: Callable[[], Set[str]], most: int | None) -> str:
        """Admit a request that records into a session; who comes first owns it. Durable when it returns.

        Args:
            session_id: The session.
            account: Who sends the request.
            there: Gives the sessions that have runs, or are about to.
            most: The most sessions that an owner may have.

        Returns:
            The session's fence, which its runs show.

        Raises:
            RequestError: It is another's, or has no owner; 403.
            StoreError: The owner has too many.
            OSError: The disk refuses.
        """
        check_session_id(session_id)
        with self._lock:
            if (record := self.of(session_id)) is None and session_id not in there():
                named = _AUTOMATIC.fullmatch(session_id)
                record = Record(
                    named[1] if named else account.owner,
                    limited=not account.is_admin or bool(named and named[1] != account.owner),
                    fence=secrets.token_hex(16),
                    claimed=time.time(),
                )
                if account.may_change(record.owner):
                    self._check_room(record, there, most)
                    self._write(session_id, record)
            if not account.may_change(record and record.owner):
                message = f"session {session_id!r} is not yours: record into another one"
                raise RequestError(message, "session_id", NOT_YOURS, 403)
            return record.fence if record else ""

    def check(self, session_id: str, fence: str | None) -> None:
        """Refuse a run of a session that was deleted since its request was admitted.

        Args:
            session_id: The session.
            fence: What `claim` gave; None of a server without keys, whose runs join whatever session there is.

        Raises:
            StoreError: It was.
            OSError: The disk refuses.
        """
        if fence is not None and fence != ((record := self.of(session_id)) and record.fence or ""):
            raise StoreError(f"Session {session_id} was deleted while the run went on: send the request again.")

    def share(self, session_id: str, shared: bool) -> None:
        """Let everybody read a session, or no more; durable when it returns.

        Raises:
            OSError: The disk refuses.
        """
        with self._lock:
            self._write(session_id, (self.of(session_id) or Record(None))._replace(shared=shared))

    def forget(self, session_id: str) -> None:
        """A session was deleted: its name is free again when this returns.

        Raises:
            OSError: The disk refuses.
        """
        with self._lock:
            if self.of(session_id) is not None:
                remove(self._folder, FOLDER, session_id)
                self._keep(session_id, None)

    def _check_room(self, new: Record, there: Callable[[], Set[str]], most: int | None) -> None:
        """Raise where an owner has too many sessions; those that never got a run are dropped before."""
        if most is None or not new.limited or len(self.limited(new.owner)) < most:
            return
        for name in self.limited(new.owner) - there():
            if self._records[name].claimed < new.claimed - _EMPTY_S:
                self.forget(name)
        if (count := len(self.limited(new.owner))) >= most:
            raise StoreError(
                f"The quota of sessions of {new.owner} is reached: {count} of {most}: delete sessions that are not "
                "needed, or raise max_owner_sessions."
            )

    def _write(self, session_id: str, record: Record) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write(self._folder, FOLDER, session_id, json.dumps(record._asdict()).encode())
        self._keep(session_id, record)

    def _keep(self, session_id: str, record: Record | None) -> None:
        self._marks.pop(session_id, None)  # it is read again once more
        if before := self._records.pop(session_id, None):
            self._sessions[before.owner].discard(session_id)
        if record is not None:
            self._records[session_id] = record
            self._sessions[record.owner].add(session_id)

    def _mark(self, name: str) -> tuple[int, int] | None:
        """By what a file of the folder, or the folder itself, is told from another that takes its place."""
        try:
            found = os.stat(self._folder / FOLDER / name, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _read(self, session_id: str) -> Record | None:
        path = Path(self._folder, FOLDER, session_id)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            with open(file, "rb") as opened:
                return Record(**json.loads(opened.read()))
        except (ValueError, TypeError):
            logger.exception("%s cannot be read: admins alone may read the session", path)
            return _UNREADABLE
