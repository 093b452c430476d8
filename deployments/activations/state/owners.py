"""The owners of sessions."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from deployments.accounts import Account
from deployments.activations.facts import StoreError, check_session_id, names_a_session
from deployments.activations.state.state import State
from deployments.errors import RequestError

NOT_YOURS = "session_not_yours"
_EMPTY_S = 3600.0  # after which a session that was claimed, and never got a run, may go
_AUTOMATIC = re.compile(r"auto-\d{4}-\d\d-\d\d-(.+)")  # the session of the day of the owner that it names


class Record(NamedTuple):
    """Whose a session is; `owner` is None where an admin has shared a session that has none.

    The owner's quotas count it if `limited`; everybody may read it if `shared`. Each time that it is `claimed` (Unix
    seconds) it gets another random `fence`, so that no late run of a deleted session becomes part of it.
    """

    owner: str | None
    shared: bool = False
    limited: bool = False
    fence: str = ""
    claimed: float = 0.0


class Owners(State):
    """The owners of a store's sessions."""

    def of(self, session_id: str) -> Record | None:
        """Whose a session is; None where it has no owner."""
        found = self._records("WHERE session = ?", session_id) if names_a_session(session_id) else {}
        return found.get(session_id)

    def all(self) -> dict[str, Record]:
        """Every record, by session."""
        return self._records("")

    def owners_of(self, session_ids: Sequence[str]) -> dict[str, str | None]:
        """The owners of those of the sessions that have a record."""
        these = "SELECT session, owner FROM owners WHERE session IN (SELECT value FROM json_each(?))"
        return dict(self.rows(these, json.dumps(session_ids)))

    def limited(self, owner: str | None) -> dict[str, Record]:
        """The sessions that count for an owner's quotas."""
        return self._records("WHERE limited AND owner IS ?", owner)

    def readable(self, account: Account) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """The sessions that an account may read: these alone, None for all; and of those not these."""
        if account.is_admin:
            return None, ()
        readable, others = list[str](), list[str]()
        for name, owner, shared in self.rows("SELECT session, owner, shared FROM owners"):
            (readable if account.may_read(owner, bool(shared)) else others).append(name)
        return (None, tuple(others)) if account.reads_unowned else (tuple(readable), ())

    def claim(self, session_id: str, account: Account, there: Callable[[], Set[str]], most: int | None) -> str:
        """Admit a request that records into a session; who comes first owns it. Returns the session's fence.

        `there` gives the sessions that have runs, or are about to; `most` sessions may be an owner's. RequestError 403
        if it is another's; StoreError if the owner has too many.
        """
        check_session_id(session_id)
        with self.change():
            if (record := self.of(session_id)) is None and session_id not in there():
                named = _AUTOMATIC.fullmatch(session_id)
                owner = named[1] if named else account.owner
                limited = not account.is_admin or bool(named and owner != account.owner)
                record = Record(owner, False, limited, fence=secrets.token_hex(16), claimed=time.time())
                if account.may_change(record.owner):
                    self._check_room(record, there, most)
                    self.put({session_id: record})
        if not account.may_change(record and record.owner):
            message = f"session {session_id!r} is not yours: record into another one"
            raise RequestError(message, "session_id", NOT_YOURS, 403)
        return record.fence if record else ""

    def check(self, session_id: str, fence: str | None) -> None:
        """Raise StoreError if a session was deleted since `claim` gave this fence; None is of a server without keys."""
        if fence is not None and fence != ((record := self.of(session_id)) and record.fence or ""):
            raise StoreError(f"Session {session_id} was deleted while the run went on: send the request again.")

    def share(self, session_id: str, shared: bool) -> None:
        """Let everybody read a session, or no more; durable when it returns."""
        with self.change():
            self.put({session_id: (self.of(session_id) or Record(None))._replace(shared=shared)})

    def add(self, records: Mapping[str, Record]) -> None:
        """Put down the owners of sessions that have none; durable when it returns."""
        self.put(records, "IGNORE")

    def put(self, records: Mapping[str, Record], known: str = "REPLACE") -> None:
        """Put down the owners of sessions; durable when it returns."""
        rows = [(session_id, *record) for session_id, record in records.items()]
        self.write(f"INSERT OR {known} INTO owners VALUES (?, ?, ?, ?, ?, ?)", rows)

    def forget(self, session_id: str) -> None:
        """A session was deleted: its name is free again when this returns."""
        self.write("DELETE FROM owners WHERE session = ?", [(session_id,)])

    def _check_room(self, new: Record, there: Callable[[], Set[str]], most: int | None) -> None:
        """Raise where an owner has too many sessions; those that never got a run are dropped before."""
        if most is None or not new.limited or len(own := self.limited(new.owner)) < most:
            return
        runs = there()
        empty = [name for name, one in own.items() if name not in runs and one.claimed < new.claimed - _EMPTY_S]
        for name in empty:
            self.forget(name)
        if (count := len(own) - len(empty)) >= most:
            raise StoreError(
                f"The quota of sessions of {new.owner} is reached: {count} of {most}: delete sessions that are not "
                "needed, or raise max_owner_sessions."
            )

    def _records(self, where: str, *values: Any) -> dict[str, Record]:
        found = self.rows(f"SELECT session, owner, shared, limited, fence, claimed FROM owners {where}", *values)
        return {row[0]: Record(row[1], bool(row[2]), bool(row[3]), *row[4:]) for row in found}
