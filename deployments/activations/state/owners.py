"""The owners of sessions."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from deployments.accounts import Account
from deployments.activations.facts import StoreError, check_session_id, names_a_session
from deployments.activations.state.state import State
from deployments.errors import RequestError

NOT_YOURS = "session_not_yours"
_AUTOMATIC = re.compile(r"auto-\d{4}-\d\d-\d\d-(.+)")  # the session of the day of the owner that it names


class Record(NamedTuple):
    """Whose a session is; `owner` is None where an admin has shared a session that has none.

    Everybody may read it if `shared`. Each time that it is claimed it gets another random `fence`, so that no late run
    of a deleted session becomes part of it.
    """

    owner: str | None
    shared: bool = False
    fence: str = ""


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

    def readable(self, account: Account) -> tuple[str, ...] | None:
        """The sessions that an account may read; None for all."""
        if account.is_admin:
            return None
        found = self.rows("SELECT session, owner, shared FROM owners")
        return tuple(name for name, owner, shared in found if account.may_read(owner, bool(shared)))

    def claim(self, session_id: str, account: Account, there: Callable[[], Set[str]]) -> str:
        """Admit a request that records into a session; who comes first owns it. Returns the session's fence.

        `there` gives the sessions that have runs, or are about to. RequestError 403 if it is another's.
        """
        check_session_id(session_id)
        with self.change():
            if (record := self.of(session_id)) is None and session_id not in there():
                named = _AUTOMATIC.fullmatch(session_id)
                owner = named[1] if named else account.owner
                record = Record(owner, fence=secrets.token_hex(16))
                if account.may_change(record.owner):
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
        self.write(f"INSERT OR {known} INTO owners VALUES (?, ?, ?, ?)", rows)

    def forget(self, session_id: str) -> None:
        """A session was deleted: its name is free again when this returns."""
        self.write("DELETE FROM owners WHERE session = ?", [(session_id,)])

    def _records(self, where: str, *values: Any) -> dict[str, Record]:
        found = self.rows(f"SELECT session, owner, shared, fence FROM owners {where}", *values)
        return {row[0]: Record(row[1], bool(row[2]), row[3]) for row in found}
