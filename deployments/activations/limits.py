"""Limits on how much is stored and for how long. Imports neither torch nor Arrow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Retention:
    """An operator's limits; None is none."""

    max_store_bytes: int | None = None  # of all sessions together
    max_session_bytes: int | None = None
    max_session_age_s: float | None = None  # seconds since its last run, after which a session is deleted
    delete_oldest: bool = False  # whether a full store deletes the oldest sessions of a run's owner, or refuses the run

    def described(self) -> str:
        """The limits that are set, written as options."""
        held = {name: value for name, value in asdict(self).items() if value not in (None, False)}
        return ", ".join(f"{name}={value}" for name, value in held.items()) or "no limits"

    @property
    def has_quotas(self) -> bool:
        """Whether any bytes are limited."""
        return any(most is not None for most in (self.max_store_bytes, self.max_session_bytes))


class SessionSize(NamedTuple):
    """A session and the bytes of its files."""

    id: str
    bytes: int


def first_of(sessions: Iterable[SessionSize], missing: int, later: int = 0) -> list[SessionSize] | None:
    """The first of `sessions` that take `missing` bytes; None unless all together take `missing` and `later` bytes.

    No more sessions are asked for than that takes.
    """
    found, size = list[SessionSize](), 0
    for session in sessions:
        if size < missing:
            found.append(session)
        size += session.bytes
        if size >= missing + later:
            return found
    return None
