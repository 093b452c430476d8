"""Presets that clients keep in a store, and the models' default presets.

Each is a file `.presets/<name>@<owner>.json` below the store's root, without an owner `<name>.json`. The ingress
validates their fields.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from deployments.accounts import OPERATOR, Account
from deployments.activations.facts import explained
from deployments.activations.files.disk import write
from deployments.client_data.files import files_in, remove
from deployments.errors import RequestError

MAX_PRESETS = 1024  # of one owner
MAX_BYTES = 1 << 20  # of one
MAX_OWN_BYTES = 16 << 20  # of all of one owner, which the store holds in memory
FOLDER, FULL = ".presets", "preset_store_full"
_FILE = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})(?:@([A-Za-z0-9_.-]+))?\.json")

logger = logging.getLogger(__name__)


class StoredPreset(NamedTuple):
    """A stored preset; `created` is in Unix seconds, `body` the preset as it was sent, as JSON."""

    name: str
    owner: str | None
    model: str | None
    description: str | None
    created: float
    is_default: bool
    body: str

    @classmethod
    def of(cls, preset: Mapping[str, Any], owner: str | None, created: float) -> StoredPreset:
        """A preset, with its name and whether it is a default among its fields, as it is stored."""
        body = json.dumps({name: value for name, value in preset.items() if name != "default"})
        about = preset.get("model"), preset.get("description")
        return cls(preset["name"], owner, *about, created, bool(preset.get("default")), body)

    @property
    def file_name(self) -> str:
        """Its file's name."""
        return f"{self.name}@{self.owner}.json" if self.owner else f"{self.name}.json"

    @property
    def as_file(self) -> bytes:
        """What its file holds."""
        head = json.dumps({"created": self.created, "default": self.is_default})
        return f'{head[:-1]}, "preset": {self.body}}}'.encode()

    def as_json(self, account: Account, is_whole: bool = True) -> dict[str, Any]:
        """The preset as answers describe it, with the fields that were sent if it `is_whole`."""
        listed = {name: getattr(self, name) for name in ("name", "model", "description", "created")}
        listed |= {"object": "preset", "default": self.is_default}
        own = json.loads(self.body) if is_whole else {}
        return {**own, **listed, **({} if account.owner is None else {"owner": self.owner})}


class StoredPresets:
    """Every preset of a store; each owner has names of their own.

    Reads may come from several threads, changes from one at a time. Changes raise StoreError on a disk error.
    """

    def __init__(self, root: Path) -> None:
        """Read what there is in the store's directory; links are not followed, other names are passed over."""
        self._root = root
        self._lock = Lock()
        self._presets: dict[tuple[str, str], StoredPreset] = {}  # by name and owner, "" without one
        presets = [preset for item in files_in(root / FOLDER) if (preset := _read(Path(item.path)))]
        for preset in sorted(presets, key=lambda preset: preset.created):  # a crash may leave the last default as one
            self._take(preset)
        self._version = time.time_ns()  # of the defaults

    def list(self, limit: int, after: str | None, account: Account = OPERATOR) -> list[dict[str, Any]]:
        """Up to `limit` presets that the account may read, by name, after `after` (an admin's is `name@owner`).

        A default is among them also where the account has a preset of its name, since it applies to their requests.
        """
        kept = self._stored()
        seen = [preset for preset in kept if preset.is_default or account.may_change(preset.owner)]
        name, at, owner = (after or "").partition("@")
        if after is not None:
            seen = [preset for preset in seen if (preset.name, preset.owner or "" if at else "") > (name, owner)]
        return [preset.as_json(account, is_whole=False) for preset in seen[:limit]]

    def put(self, preset: Mapping[str, Any], account: Account = OPERATOR) -> dict[str, Any]:
        """Keep a preset as it was sent, in the place of one of its name, and of the model's last default if it is one.

        Durable when it returns, with what `get` returns. RequestError if it is too large, its owner has too many, or
        an owner who is no admin changes a default, which affects other users.
        """
        new = StoredPreset.of(preset, account.owner, time.time())
        if (size := len(new.body.encode())) > MAX_BYTES:
            message = f"{size} bytes, and a preset has {MAX_BYTES} at most: send vectors as tensor files"
            raise RequestError(message, None, "preset_too_large", 413)
        own = {kept.name: kept for kept in self._stored() if kept.owner == account.owner}
        others = [len(kept.body) for kept in own.values() if kept.name != new.name]
        if len(others) >= MAX_PRESETS or sum(others) + len(new.body) > MAX_OWN_BYTES:
            room = f"there is room for {MAX_PRESETS} of {MAX_OWN_BYTES} bytes together"
            raise RequestError(f"{len(others)} presets take {sum(others)} bytes, and {room}: delete some", None, FULL)
        is_news = new.is_default or (new.name in own and own[new.name].is_default)
        if is_news and not account.is_admin:
            raise _defaults_are_admins()
        with explained(self._root):
            write(self._root, FOLDER, new.file_name, [new.as_file])
            last = self._take(new)
            self._renew_version(is_news)
            for other in last:
                write(self._root, FOLDER, other.file_name, [other.as_file])
        return new.as_json(account)

    def get(self, name: str, account: Account = OPERATOR, owner: str | None = None) -> dict[str, Any] | None:
        """What `find` finds, for an answer."""
        kept = self.find(name, account, owner)
        return kept.as_json(account) if kept else None

    def find(self, name: str, account: Account, owner: str | None = None) -> StoredPreset | None:
        """A preset: their own, else one without an owner, else a default; an admin may name an `owner`, "" for none."""
        of_name = [preset for preset in self._stored() if preset.name == name]
        by_owner = {preset.owner: preset for preset in of_name}
        if owner is not None:
            return by_owner.get(owner or None) if account.may_change(owner or None) else None
        for own in (account.owner, None):
            if own in by_owner and (own == account.owner or account.may_change(own)):
                return by_owner[own]
        defaults = [preset for preset in of_name if preset.is_default]
        return min(defaults, key=lambda preset: preset.model or "", default=None)

    def defaults(self, known: int | None) -> tuple[int, dict[str, StoredPreset]] | None:
        """The models' default presets, and the version of all that is known; None where `known` is that version."""
        version = self._version  # before the rest: what changes meanwhile is news once more
        if version == known:
            return None
        return version, {preset.model: preset for preset in self._stored() if preset.is_default and preset.model}

    def delete(self, name: str, account: Account = OPERATOR, owner: str | None = None) -> bool:
        """Delete a preset, found as by `find`; false if the account may change none. Defaults are admins'.

        Another admin's default is deleted only if its `owner` is named.
        """
        kept = self.find(name, account, owner)
        if kept is None or not account.may_change(kept.owner):
            return False
        if owner is None and kept.owner not in (None, account.owner):
            return False
        if kept.is_default and not account.is_admin:
            raise _defaults_are_admins()
        remove(self._root, FOLDER, kept.file_name)
        with self._lock:
            del self._presets[kept.name, kept.owner or ""]
        self._renew_version(kept.is_default)
        return True

    def _stored(self) -> Sequence[StoredPreset]:
        """All of them, by name and owner."""
        with self._lock:
            return [self._presets[key] for key in sorted(self._presets)]

    def _take(self, new: StoredPreset) -> Sequence[StoredPreset]:
        """Keep a preset in memory; returns the defaults that are no more, as they are now."""
        with self._lock:
            self._presets[new.name, new.owner or ""] = new
            last = [
                (key, preset._replace(is_default=False))
                for key, preset in self._presets.items()
                if new.is_default and preset.is_default and preset.model == new.model and preset is not new
            ]
            self._presets |= last
        return [preset for _, preset in last]

    def _renew_version(self, is_news: bool) -> None:
        """Give `defaults` a new version after a change; versions increase even if the clock is set back."""
        if is_news:
            self._version = max(self._version + 1, time.time_ns())


def _read(path: Path) -> StoredPreset | None:
    """The preset of a file; None if it has another name than a preset's, or cannot be read."""
    if (match := _FILE.fullmatch(path.name)) is None:
        return None
    try:
        content = json.loads(path.read_bytes())
        named = content["preset"] | {"name": match[1], "default": content["default"]}
        return StoredPreset.of(named, match[2], float(content["created"]))
    except (OSError, ValueError, KeyError, TypeError):  # others are served all the same
        logger.exception("%s cannot be read and is not listed", path)
        return None


def _defaults_are_admins() -> RequestError:
    message = "a default changes the answers of other users: that needs a key with the role admin"
    return RequestError(message, "default", "insufficient_permissions", 403)
