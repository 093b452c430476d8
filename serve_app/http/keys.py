"""API keys: the role of each, and the owner of the data that it creates."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from deployments.options import fits_header

VARIABLE = "VITRINE_API_KEYS"
SHORTEST = 16  # minimum length of a key in characters
OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # the name of an owner
UNNAMED_OWNER_PREFIX = "key-"  # prefix of the owner of a key without a name; no name may start with it
LOOK_S = 1.0  # between two looks whether the file has changed

logger = logging.getLogger("ray.serve")


class Role(StrEnum):
    """The permissions of a key."""

    USE = "use"  # ask, record, and manage one's own data
    CODE = "code"  # the same, and run code over the served weights
    ADMIN = "admin"  # everything, with everyone's data


@dataclass(frozen=True)
class Caller:
    """The sender of a request.

    Attributes:
        role: The key's role.
        owner: The owner of the data that they create; None on a server without keys, where nothing has an owner.
    """

    role: Role
    owner: str | None = None

    @property
    def is_admin(self) -> bool:
        """Whether they may change shared data and data of others."""
        return self.role is Role.ADMIN

    @property
    def may_run_code(self) -> bool:
        """Whether they may run their own code, if the operator allows it."""
        return self.role in (Role.CODE, Role.ADMIN)


@dataclass
class Keys:
    """The operator's keys; without any, the server is open.

    A file of keys is read again when it has changed; a mistake in it, or its removal, leaves the last keys in use.
    Only SHA-256 digests are kept, so that no log, pickle or status of Serve can reveal a key.
    """

    _callers: Mapping[bytes, Caller] = field(default_factory=dict, repr=False)  # by the digest of a key
    _of_variable: Mapping[bytes, Caller] = field(default_factory=dict, repr=False)  # those that no file changes
    _path: str | None = None
    _state: tuple[int, ...] = ()  # the file's when it was read last in this process
    _error: str = ""  # why it could not be read
    _next_look: float = 0.0  # monotonic seconds

    @classmethod
    def read(cls, path: str | None) -> Keys:
        """Read the keys of a file and of the environment variable `VITRINE_API_KEYS`.

        Both contain `role:key` or `role@name:key`, separated by white space; a line that starts with `#` is a comment.
        A key's data belong to its name, so that a new key with the same name has access to them.

        Args:
            path: The file, if there is one.

        Raises:
            ValueError: An entry is malformed, or a source of keys is empty, which would leave the server open.
            OSError: The file cannot be read.
        """
        of_variable = _added({}, VARIABLE, os.environ[VARIABLE]) if VARIABLE in os.environ else {}
        if path is None:
            return cls(of_variable)
        return cls(_added(of_variable, path, Path(path).read_text()), of_variable, str(Path(path).absolute()))

    def __bool__(self) -> bool:
        return bool(self._callers)

    def caller(self, key: bytes) -> Caller | None:
        """The caller with this key; None for an unknown key. Takes the same time for any key."""
        if self._path is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._look(self._path)
        digest = _digest(key)
        match = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                match = caller
        return match

    def _look(self, path: str) -> None:
        """Read the file if it has changed."""
        try:
            file = os.stat(path)
            # The time of the inode's change as well: permissions may be given back, and editors set the other.
            state = (file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns)
            if state != self._state:
                self._callers = _added(self._of_variable, path, Path(path).read_text())
                self._state, self._error = state, ""
        except (OSError, ValueError) as error:
            if str(error) != self._error:
                self._error = str(error)
                logger.warning("the API keys that were read last stay in use: %s", error)


def _added(callers: Mapping[bytes, Caller], source: str, text: str) -> dict[bytes, Caller]:
    """Callers, and those of a text. ValueError if it has none, or a key of another caller."""
    both = dict(callers)
    entries = list(_entries(source, text))
    if not entries:
        raise ValueError(f"{source} holds no API key; an entry is role:key or role@name:key")
    for digest, caller in entries:
        if both.setdefault(digest, caller) != caller:
            raise ValueError(f"{source}: a key appears twice, with different roles or names")
    return both


def _entries(source: str, text: str) -> Iterator[tuple[bytes, Caller]]:
    """Each key's digest and caller. Errors name only the line, because it may contain a key."""
    for number, line in enumerate(text.splitlines(), 1):
        for entry in line.split() if not line.lstrip().startswith("#") else ():
            who, _, key = entry.partition(":")
            role, at, name = who.partition("@")
            if role not in list(Role) or len(key) < SHORTEST or not fits_header(key):
                *most, last = Role
                raise ValueError(
                    f"{source}, line {number}: an entry is role:key or role@name:key, the role {', '.join(most)} or "
                    f"{last}, the key at least {SHORTEST} printable ASCII characters"
                )
            if at and (not OWNER.fullmatch(name) or name.startswith(UNNAMED_OWNER_PREFIX)):
                raise ValueError(
                    f"{source}, line {number}: a name is up to 64 letters, digits, '_', '.' and '-', begins with a "
                    f"letter or digit, and not with {UNNAMED_OWNER_PREFIX!r}"
                )
            yield _digest(key.encode()), Caller(Role(role), name or _owner(key.encode()))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _owner(key: bytes) -> str:
    """The owner of a key without a name: a keyed hash, from which neither the key nor its digest can be derived."""
    return UNNAMED_OWNER_PREFIX + hmac.new(key, b"owner", hashlib.sha256).hexdigest()[:32]
