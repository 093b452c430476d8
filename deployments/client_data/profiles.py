"""Profiles of capture and interventions that clients keep in a store, and the models' default profiles."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deployments.accounts import OPERATOR, Account
from deployments.activations.state.state import State
from deployments.errors import RequestError
from deployments.points.profiles import Profile

MAX_PROFILES = 1024  # of one owner
MAX_BYTES = 1 << 20  # of one
_LISTED = "name, NULLIF(owner, ''), model, description, created, is_default"


class _StoredProfile(NamedTuple):
    """A stored profile; `created` is in Unix seconds, `body` what it does, left out of lists."""

    name: str
    owner: str | None
    model: str | None
    description: str | None
    created: float
    is_default: bool
    body: str = "{}"

    def as_json(self, account: Account) -> dict[str, Any]:
        """The same for an answer."""
        listed = {name: getattr(self, name) for name in ("name", "model", "description", "created")}
        listed |= {"object": "intervention_profile", "default": bool(self.is_default)}
        return {**json.loads(self.body), **listed, **({} if account.owner is None else {"owner": self.owner})}


class StoredProfiles(State):
    """Every profile of a store; each owner has names of their own."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.rows("SELECT 1")  # it is opened now, and read then also while the directory is away
        self._version = time.time_ns()  # of the defaults

    def list(self, limit: int, after: str | None, account: Account = OPERATOR) -> list[dict[str, Any]]:
        """Up to `limit` profiles that the account may read, by name, after `after` (an admin's is `name@owner`).

        A default is among them also where the account has a profile of its name, since it applies to their requests.
        """
        kept = self._stored("ORDER BY name, owner", columns=_LISTED)
        own = {one.name for one in kept if one.owner == account.owner}
        seen = [
            one
            for one in kept
            if one.is_default or account.may_change(one.owner) or (account.may_read(one.owner) and one.name not in own)
        ]
        name, at, owner = (after or "").partition("@")
        if after is not None:
            seen = [one for one in seen if ((one.name, one.owner or "") > (name, owner) if at else one.name > name)]
        return [one.as_json(account) for one in seen[:limit]]

    def put(self, profile: Profile, account: Account = OPERATOR) -> dict[str, Any]:
        """Keep a profile, in the place of one of its name, and of the model's last default if it is one.

        Durable when it returns, with what `get` returns. RequestError if it is too large, its owner has too many, or
        an owner who is no admin changes a default, which affects other users.
        """
        body = profile.model_dump_json(by_alias=True, exclude_unset=True, exclude={"default"})
        if (size := len(body.encode())) > MAX_BYTES:
            message = f"{size} bytes, and a profile has {MAX_BYTES} at most: send vectors as tensor files"
            raise RequestError(message, None, "profile_too_large", 413)
        new = _StoredProfile(
            profile.name, account.owner, profile.model, profile.description, time.time(), profile.default, body
        )
        with self.change() as database:
            own = {one.name: one for one in self._stored("WHERE owner = ?", account.owner or "", columns=_LISTED)}
            if len(own.keys() - {new.name}) >= MAX_PROFILES:
                raise RequestError(f"there are {MAX_PROFILES} profiles: delete some", None, "profile_store_full")
            is_news = new.is_default or (new.name in own and own[new.name].is_default)
            if is_news and not account.is_admin:
                raise _defaults_are_admins()
            if new.is_default:
                database.execute("UPDATE profiles SET is_default = 0 WHERE is_default AND model = ?", (new.model,))
            row = new._replace(owner=new.owner or "")
            database.execute("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self._tell(is_news)
        return new.as_json(account)

    def get(self, name: str, account: Account = OPERATOR, owner: str | None = None) -> dict[str, Any] | None:
        """A profile: their own, else one without an owner, else a default; an admin may name its `owner`."""
        kept = self._find(name, account, owner)
        return kept.as_json(account) if kept else None

    def defaults(self, known: int | None) -> tuple[int, dict[str, dict[str, Any]]] | None:
        """The models' default profiles, and the version of all that is known; None where `known` is that version."""
        version = self._version  # before the rest: what changes meanwhile is news once more
        if version == known:
            return None
        return version, {one.model: one.as_json(OPERATOR) for one in self._stored("WHERE is_default") if one.model}

    def delete(self, name: str, account: Account = OPERATOR, owner: str | None = None) -> bool:
        """Delete a profile, found as by `get`; false if the account may change none. Defaults are admins'."""
        with self.change() as database:
            kept = self._find(name, account, owner)
            if kept is None or not account.may_change(kept.owner):
                return False
            if kept.is_default and not account.is_admin:
                raise _defaults_are_admins()
            database.execute("DELETE FROM profiles WHERE name = ? AND owner = ?", (kept.name, kept.owner or ""))
        self._tell(kept.is_default)
        return True

    def _find(self, name: str, account: Account, owner: str | None) -> _StoredProfile | None:
        of_name = self._stored("WHERE name = ? ORDER BY model", name) if name.isascii() else []
        by_owner = {one.owner: one for one in of_name}
        if owner is not None:
            return by_owner.get(owner) if account.may_change(owner) else None
        own = [account.owner] + ([None] if account.may_read(None) else [])
        found = [by_owner[one] for one in own if one in by_owner] + [one for one in of_name if one.is_default]
        return found[0] if found else None

    def _stored(self, which: str, *values: Any, columns: str = f"{_LISTED}, body") -> Sequence[_StoredProfile]:
        return [_StoredProfile(*row) for row in self.rows(f"SELECT {columns} FROM profiles {which}", *values)]

    def _tell(self, is_news: bool) -> None:
        """Give `defaults` a new version after a change; versions increase even if the clock is set back."""
        if is_news:
            self._version = max(self._version + 1, time.time_ns())


def _defaults_are_admins() -> RequestError:
    message = "a default changes the answers of other users: that needs a key with the role admin"
    return RequestError(message, "default", "insufficient_permissions", 403)
