"""Limits on how much is stored and for how long. Imports neither torch nor Arrow."""

from __future__ import annotations

from dataclasses import asdict, dataclass


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
        return self.max_store_bytes is not None or self.max_session_bytes is not None
