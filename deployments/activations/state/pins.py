"""Which sessions are pinned, and the limits that a store keeps to when it comes back by itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from deployments.activations.facts import StoreError, check_session_id
from deployments.activations.limits import Retention
from deployments.activations.state.state import State
from deployments.errors import RequestError

logger = logging.getLogger(__name__)


class Pins(State):
    """The pinned sessions of a store."""

    def names(self) -> frozenset[str]:
        """All of them."""
        return frozenset(name for (name,) in self.rows("SELECT session FROM pins"))

    def __contains__(self, session_id: str) -> bool:
        return session_id in self.names()

    def set(self, session_id: str, pinned: bool) -> None:
        """Pin a session, or take its pin away; durable when it returns. ValueError if the id can name no session."""
        check_session_id(session_id)
        if pinned:
            self.add([session_id])
        else:
            self.write("DELETE FROM pins WHERE session = ?", [(session_id,)])

    def add(self, session_ids: Iterable[str]) -> None:
        """Pin sessions; durable when it returns."""
        self.write("INSERT OR IGNORE INTO pins VALUES (?)", [(name,) for name in session_ids])

    def check(self, session_id: str) -> None:
        """Raise RequestError where a session is pinned: it may not be deleted."""
        if session_id in self:
            message = f"session {session_id!r} is pinned: unpin it before you delete it"
            raise RequestError(message, "session_id", "session_pinned", 409)


def saved_limits(root: Path, life: str) -> Retention:
    """What `save_limits` saved in this life; no limits where it saved none, or they cannot be read."""
    try:
        for (said,) in State(root).rows("SELECT said FROM limits WHERE life = ?", life):
            return Retention(**json.loads(said))
    except (ValueError, TypeError):
        logger.exception("saved limits of %s cannot be read: nothing is limited until an application starts", root)
    return Retention()


def save_limits(root: Path, life: str, retention: Retention) -> None:
    """Save limits for a store that comes back by itself, which alone has this `life`; a full disk is logged."""
    try:
        with State(root).change() as database:
            database.execute("DELETE FROM limits")
            database.execute("INSERT INTO limits VALUES (?, ?)", (life, json.dumps(asdict(retention))))
    except StoreError:
        logger.exception("the limits of %s are not saved: they hold until the store comes back by itself", root)
