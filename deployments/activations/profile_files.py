"""Profiles on disk, beside the sessions: `<root>/.profiles/<name>.json`, and which are models' defaults.

The defaults are one file of their own, so that a new one takes an old one's place at once. What a client calls a
profile is only ever looked up among those that are known.
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

from deployments.activations.facts import page
from deployments.activations.failures import explain
from deployments.activations.profiles import Profile
from deployments.activations.small_files import found, remove, write
from deployments.errors import RequestError

FOLDER = ".profiles"  # no session id begins with '.'
DEFAULTS = ".defaults.json"  # nor does a profile's name
MAX_PROFILES = 1024
MAX_BYTES = 1 << 20  # of one
_FILE = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})\.json")

logger = logging.getLogger(__name__)


class _Kept(NamedTuple):
    """What is known of a profile without its file; `created` is in Unix seconds."""

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
        self._kept: dict[str, _Kept] = {}
        self._defaults: dict[str, str] = {}  # model -> profile
        self._version = time.time_ns()
        defaults: Any = {}
        for item in found(root, FOLDER):
            try:
                if item.name == DEFAULTS:
                    defaults = json.loads(Path(item.path).read_bytes())
                elif match := _FILE.fullmatch(item.name):
                    profile = Profile.model_validate_json(Path(item.path).read_bytes())
                    if profile.name != match[1]:
                        raise ValueError(f"it is the profile {profile.name!r} under another name")
                    self._kept[match[1]] = _Kept(profile.model, profile.description, item.stat().st_mtime)
            except (OSError, ValueError):  # one bad file must not keep the others from being served
                logger.exception("profile %s cannot be read and is not listed", item.path)
        for model, name in defaults.items() if isinstance(defaults, dict) else ():
            if name in self._kept and self._kept[name].model == model:  # else a crash came between the two files
                self._defaults[model] = name

    def list(self, limit: int, after: str | None) -> list[dict[str, Any]]:
        """Up to `limit` profiles in the order of their names, beginning behind `after`; without what they do."""
        with self._lock:
            return [self._summary(name) for name in page(self._kept, limit, after)]

    def put(self, profile: Profile, by_admin: bool) -> dict[str, Any]:
        """Keep a profile, in the place of one of its name; durable when it returns.

        Args:
            profile: The profile; where it is a default, it takes the place of the model's last one.
            by_admin: Whether defaults may change: they change what others are answered.

        Returns:
            What `get` says of it.

        Raises:
            RequestError: It is too large, there are too many, or defaults may not change.
            StoreError: The disk refuses.
        """
        name = profile.name
        data = profile.model_dump_json(by_alias=True, exclude_unset=True, exclude={"default"}).encode()
        if len(data) > MAX_BYTES:
            message = f"{len(data)} bytes, and a profile has {MAX_BYTES} at most: send vectors as tensor files"
            raise RequestError(message, None, "profile_too_large", 413)
        with self._lock:
            others = {model: other for model, other in self._defaults.items() if other != name}
            full = len(self._kept.keys() | {name}) > MAX_PROFILES
        if full:
            raise RequestError(f"there are {MAX_PROFILES} profiles: delete some", None, "profile_store_full")
        was_default = len(others) < len(self._defaults)
        if (profile.default or was_default) and not by_admin:
            message = "a default changes what others are answered: that needs a key with the role admin"
            raise RequestError(message, "default", "insufficient_permissions", 403)
        defaults = others | ({profile.model: name} if profile.default and profile.model else {})
        try:
            created = self._write(name, data, defaults)
        except OSError as error:
            raise explain(self._root, error) from error
        with self._lock:
            self._kept[name] = _Kept(profile.model, profile.description, created)
            self._change(defaults, name)
        return self._whole(name, data)

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

    def get(self, name: str) -> dict[str, Any] | None:
        """A profile as it was sent, with when, and whether it is a default; None if there is none.

        Raises:
            StoreError: The disk refuses.
        """
        with self._lock:
            if name not in self._kept:
                return None
        try:
            return self._whole(name, (self._root / FOLDER / f"{name}.json").read_bytes())
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
        return version, {model: whole for model, name in defaults.items() if (whole := self.get(name))}

    def delete(self, name: str) -> bool:
        """Delete a profile: true when it is gone, false if there was none.

        Raises:
            StoreError: The disk refuses.
        """
        with self._lock:
            if name not in self._kept:
                return False
            defaults = {model: other for model, other in self._defaults.items() if other != name}
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

    def _summary(self, name: str) -> dict[str, Any]:
        kept = self._kept[name]
        return {
            "name": name,
            "object": "intervention_profile",
            "created": kept.created,
            "model": kept.model,
            "default": self._defaults.get(kept.model or "") == name,
            "description": kept.description,
        }

    def _whole(self, name: str, data: bytes) -> dict[str, Any]:
        with self._lock:
            summary = self._summary(name)
        whole: dict[str, Any] = json.loads(data)
        return whole | summary
