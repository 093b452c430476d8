"""Limits on how much is stored and for how long. Imports neither torch nor Arrow."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from deployments.activations.facts import StoreError, explained
from deployments.activations.files.disk import write

LIMITS = ".limits.json"  # in a store's directory; no session id starts with '.'

logger = logging.getLogger(__name__)


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


def read_limits(root: Path) -> Retention:
    """What `write_limits` wrote last; no limits where it never did, or they cannot be read."""
    try:
        return Retention(**json.loads((root / LIMITS).read_text()))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError):
        logger.exception("%s cannot be read: nothing is limited until an application starts", root / LIMITS)
    return Retention()


def write_limits(root: Path, limits: Retention) -> None:
    """Keep limits for a store that starts again. A full disk is logged."""
    try:
        with explained(root):
            write(root, ".", LIMITS, [json.dumps(asdict(limits)).encode()])
    except StoreError:
        logger.exception("the limits of %s are not kept: they hold until the store starts again", root)
