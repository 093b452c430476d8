"""Who asks, and what they may read and change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Account:
    """Who asks: `owner` of what they make (None on a server without keys), `is_admin`."""

    owner: str | None = None
    is_admin: bool = True

    def may_change(self, owner: str | None) -> bool:
        """Whether they may read, add to, change and delete what has this owner, or none."""
        return self.is_admin or (owner is not None and owner == self.owner)


@dataclass(frozen=True)
class Exactly(Account):
    """Reads only what has the same owner, or only what has none."""

    is_admin: bool = False

    def may_change(self, owner: str | None) -> bool:
        """Whether the owner is the same."""
        return owner == self.owner


OPERATOR = Account()
