"""Profiles on disk, beside the sessions: `<root>/.profiles/<name>.json`, and which are models' defaults.

A profile with an owner is `<name>@<owner>.json`: each owner has names of their own. The defaults are one file, so that
a new one takes an old one's place at once. What a client calls a profile is only ever looked up among those that are
known.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from deployments.activations.accounts import OPERATOR, Account
from deployments.activations.failures import explain
from deployments.activations.small_files import found, remove, write
from deployments.errors import RequestError
from deployments.points.profiles import Profile, body_of

FOLDER = ".profiles"  # no session id begins with '.'
DEFAULTS = ".defaults.json"  # nor does a profile's name
MAX_PROFILES = 1024  # of one owner
MAX_BYTES = 1 << 20  # of one
_FILE = re.compile(r"(([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})(?:@([A-Za-z0-9_.-]+))?)\.json")

logger = logging.getLogger(__name__)


class _Kept(NamedTuple):
    """What is known of a profile without its file; `created` is in Unix seconds."""

    name: str
    owner: str | None
    model: str | None
    description: str | None
    created: float


class ProfileFiles:
    """Every profile below one root.

    Reads may come from several threads; `put` and `delete` from one at a time.
    """

    def __init__(self, root: Path) -> None:
        """Read what the files say; links are not followed, other names are passed over.

        Args:
            root: The store's directory, absolute and no link.
        """
        self._root = root
        self._lock = Lock()
        self._kept: dict[str, _Kept] = {}  # by what the file is called
        self._defaults: dict[str, str] = {}  # model -> the same
        self._version = time.time_ns()
        defaults: Any = {}
        for item in found(root, FOLDER):
            try:
                if item.name == DEFAULTS:
                    defaults = json.loads(Path(item.path).read_bytes())
                elif match := _FILE.fullmatch(item.name):
                    profile = Profile.model_validate(body_of(Path(item.path).read_bytes()))
                    if profile.name != match[2]:
                        raise ValueError(f"it is the profile {profile.name!r} under another name")
                    created = item.stat().st_mtime
                    self._kept[match[1]] = _Kept(profile.name, match[3], profile.model, profile.description, created)
            except (OSError, ValueError):  # one bad file must not keep the others from being served
                logger.exception("profile %s cannot be read and is not listed", item.path)
        for model, name in defaults.items() if isinstance(defaults, dict) else ():
            if name in self._kept and self._kept[name].model == model:  # else a crash came between the two files
                self._defaults[model] = name

    def list(self, limit: int, after: str | None, account: Account = OPERATOR) -> list[dict[str, Any]]:
        """Up to `limit` profiles that the account may read in the order of their names; without what they do.

        Args:
            limit: How many.
            after: The name behind which they begin; for an admin `name@owner`, since names may be there several times.
            account: Who asks. Of what has no owner they see what no profile of their own hides.
        """
        with self._lock:
            found = {
                (kept.name, kept.owner or ""): file
                for file, kept in self._kept.items()
                if account.may_change(kept.owner)
                or (account.may_read(kept.owner) and _file(kept.name, account.owner) not in self._kept)
            }
            name, at, owner = (after or "").partition("@")
            behind = sorted(key for key in found if after is None or (key > (name, owner) if at else key[0] > name))
            return [self._summary(found[key], account) for key in behind[:limit]]

    def put(self, profile: Profile, account: Account = OPERATOR, most: int = MAX_PROFILES) -> dict[str, Any]:
        """Keep a profile, in the place of one of its name; durable when it returns.

        Args:
            profile: The profile; where it is a default, it takes the place of the model's last one.
            account: Whose it is. An admin may change defaults: they change what others are answered.
            most: The most profiles of an owner who is no admin.

        Returns:
            What `get` says of it.

        Raises:
            RequestError: It is too large, there are too many, or defaults may not change.
            StoreError: The disk refuses.
        """
        name = _file(profile.name, account.owner)
        most = MAX_PROFILES if account.is_admin else min(most, MAX_PROFILES)
        data = profile.model_dump_json(by_alias=True, exclude_unset=True, exclude={"default"}).encode()
        if len(data) > MAX_BYTES:
            message = f"{len(data)} bytes, and a profile has {MAX_BYTES} at most: send vectors as tensor files"
            raise RequestError(message, None, "profile_too_large", 413)
        with self._lock:
            others = {model: other for model, other in self._defaults.items() if other != name}
            own = [file for file, kept in self._kept.items() if kept.owner == account.owner and file != name]
        if len(own) >= most:
            raise RequestError(f"there are {most} profiles: delete some", None, "profile_store_full")
        was_default = len(others) < len(self._defaults)
        if (profile.default or was_default) and not account.is_admin:
            raise _defaults_are_admins()
        defaults = others | ({profile.model: name} if profile.default and profile.model else {})
        try:
            created = self._write(name, data, defaults)
        except OSError as error:
            raise explain(self._root, error) from error
        with self._lock:
            self._kept[name] = _Kept(profile.name, account.owner, profile.model, profile.description, created)
            self._change(defaults, name)
        return self._whole(name, data, account)

    def _write(self, name: str, data: bytes, defaults: dict[str, str]) -> float:
        """Write a profile and the defaults, both or neither; the profile's time of modification."""
        path = self._root / FOLDER / f"{name}.json"
        before = path.read_bytes() if name in self._kept else None
        created = write(self._root, FOLDER, path.name, data)
        try:
            self._keep_defaults(defaults)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                if before is None:
                    remove(self._root, FOLDER, path.name)
                else:
                    write(self._root, FOLDER, path.name, before)
            raise
        return created

    def get(self, name: str, account: Account = OPERATOR, owner: str | None = None) -> dict[str, Any] | None:
        """A profile as it was sent, with when, and whether it is a default; None if the account may read none.

        Args:
            name: Its name.
            account: Who asks. Their own comes first, then the one without an owner, then a default.
            owner: Whose it is, where it is none of these; for an admin.

        Raises:
            StoreError: The disk refuses.
        """
        file = self._find(name, account, owner)
        return None if file is None else self._read(file, account)

    def _find(self, name: str, account: Account, owner: str | None) -> str | None:
        with self._lock:
            if owner is not None:
                file = _file(name, owner)
                return file if file in self._kept and account.may_change(owner) else None
            own = [_file(name, account.owner)] + ([name] if account.may_read(None) else [])
            defaults = [file for _, file in sorted(self._defaults.items()) if self._kept[file].name == name]
            return next((file for file in own + defaults if file in self._kept), None)

    def _read(self, file: str, account: Account) -> dict[str, Any] | None:
        try:
            return self._whole(file, (self._root / FOLDER / f"{file}.json").read_bytes(), account)
        except (FileNotFoundError, KeyError):
            return None  # deleted meanwhile
        except OSError as error:
            raise explain(self._root, error) from error

    def defaults(self, known: int | None) -> tuple[int, dict[str, dict[str, Any]]] | None:
        """The models' default profiles, and the version of all that is known; None where `known` is that version.

        Raises:
            StoreError: The disk refuses.
        """
        with self._lock:
            version, defaults = self._version, dict(self._defaults)
        if version == known:
            return None
        return version, {model: whole for model, file in defaults.items() if (whole := self._read(file, OPERATOR))}

    def delete(self, name: str, account: Account = OPERATOR, owner: str | None = None) -> bool:
        """Delete a profile, found as by `get`: true when it is gone, false if the account may change none of the name.

        Raises:
            RequestError: It is a default, and the account is no admin's.
            StoreError: The disk refuses.
        """
        file = self._find(name, account, owner)
        with self._lock:
            if file is None or not account.may_change(self._kept[file].owner):
                return False
            name = file
            defaults = {model: other for model, other in self._defaults.items() if other != name}
            if len(defaults) < len(self._defaults) and not account.is_admin:
                raise _defaults_are_admins()
        try:
            self._keep_defaults(defaults)
            with self._lock:
                self._change(defaults, name)
            remove(self._root, FOLDER, f"{name}.json")
        except OSError as error:
            raise explain(self._root, error) from error
        with self._lock:
            del self._kept[name]
        return True

    def _keep_defaults(self, defaults: dict[str, str]) -> None:
        if defaults != self._defaults:
            write(self._root, FOLDER, DEFAULTS, json.dumps(defaults).encode())

    def _change(self, defaults: dict[str, str], name: str) -> None:
        """Take new defaults, or a new form of one; the lock is held.

        Versions only grow, also where the clock goes back.
        """
        if defaults != self._defaults or name in defaults.values():
            self._version = max(self._version + 1, time.time_ns())
        self._defaults = defaults

    def _summary(self, file: str, account: Account) -> dict[str, Any]:
        kept = self._kept[file]
        summary = {
            "name": kept.name,
            "object": "intervention_profile",
            "created": kept.created,
            "model": kept.model,
            "default": self._defaults.get(kept.model or "") == file,
            "description": kept.description,
        }
        return summary if account.owner is None else summary | {"owner": kept.owner}

    def _whole(self, file: str, data: bytes, account: Account) -> dict[str, Any]:
        with self._lock:
            summary = self._summary(file, account)
        whole = body_of(data)
        return whole | summary


def _file(name: str, owner: str | None) -> str:
    """What a profile's file is called, but for its end."""
    return f"{name}@{owner}" if owner else name


def _defaults_are_admins() -> RequestError:
    message = "a default changes what others are answered: that needs a key with the role admin"
    return RequestError(message, "default", "insufficient_permissions", 403)
