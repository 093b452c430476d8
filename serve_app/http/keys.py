"""API keys: the role of each, and the owner of the data that it creates."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from deployments.options import fits_header

VARIABLE = "VITRINE_API_KEYS"
SHORTEST = 16  # characters of a key
OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # the name of an owner
UNNAMED_OWNER_PREFIX = "key-"  # how the owner of a key without a name begins; no name may begin so


class Role(StrEnum):
    """What a key may do."""

    USE = "use"  # ask, record, and manage what is its own
    CODE = "code"  # the same, and run code of its own over the served weights
    ADMIN = "admin"  # everything, with everybody's data


@dataclass(frozen=True)
class Caller:
    """Who sends a request.

    Attributes:
        role: What they may do.
        owner: Whom what they make belongs to; None on a server without keys, where nothing has an owner.
    """

    role: Role
    owner: str | None = None

    @property
    def is_admin(self) -> bool:
        """Whether they may change what all share, and what is others'."""
        return self.role is Role.ADMIN

    @property
    def may_run_code(self) -> bool:
        """Whether they may run code of their own, where the operator allows any."""
        return self.role in (Role.CODE, Role.ADMIN)


@dataclass(frozen=True)
class Keys:
    """The operator's keys; none at all leave the server open.

    Kept as SHA-256 digests alone: what does not hold a key cannot show it, in a log, a pickle or Serve's status.
    """

    _callers: dict[bytes, Caller] = field(default_factory=dict, repr=False)  # by a key's digest

    @classmethod
    def read(cls, path: str | None) -> Keys:
        """The keys of a file and of the environment's `VITRINE_API_KEYS`.

        Both hold `role:key` or `role@name:key`, apart from each other by white space; a line that begins with `#` is a
        comment. What a key makes belongs to its name, so that a new key of the same name finds it.

        Args:
            path: The file, if there is one.

        Raises:
            ValueError: An entry is none, or where keys are to be, there are none: the server would stand open.
            OSError: The file cannot be read.
        """
        sources = {}
        if path is not None:
            sources[path] = Path(path).read_text()
        if VARIABLE in os.environ:
            sources[VARIABLE] = os.environ[VARIABLE]
        callers: dict[bytes, Caller] = {}
        for source, text in sources.items():
            found = list(_entries(source, text))
            if not found:
                raise ValueError(f"{source} holds no API key; an entry is role:key or role@name:key")
            for digest, caller in found:
                if callers.setdefault(digest, caller) != caller:
                    raise ValueError(f"{source}: a key appears twice, with different roles or names")
        return cls(callers)

    def __bool__(self) -> bool:
        return bool(self._callers)

    def caller(self, key: bytes) -> Caller | None:
        """Who sends a key; None where it is none of these. Takes as long for any key."""
        digest = _digest(key)
        found = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def _entries(source: str, text: str) -> Iterator[tuple[bytes, Caller]]:
    """Each key's digest, and its caller. Errors name the line only, because it may hold a key."""
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
