"""Which sessions are pinned: of each an empty file `<root>/.pins/<session_id>`, which no rebuild touches."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

from deployments.activations.facts import check_session_id, names_a_session
from deployments.activations.retention import Retention
from deployments.activations.small_files import found, remove, write
from deployments.errors import RequestError

FOLDER = ".pins"  # no session id begins with '.'
_LIMITS = (".retention", "limits.json")

logger = logging.getLogger(__name__)


class Pins:
    """The pinned sessions below one root.

    Each answer is the disk's: another server on the same directory may pin, too.

    Args:
        root: The store's, absolute and no link.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> frozenset[str]:
        """Which there are; links are not followed, other names are passed over.

        Raises:
            OSError: The disk refuses.
        """
        return frozenset(item.name for item in found(self._root, FOLDER) if names_a_session(item.name))

    def __contains__(self, session_id: str) -> bool:
        return session_id in self.names()

    def set(self, session_id: str, pinned: bool) -> None:
        """Pin a session, or take its pin away; durable when it returns.

        Raises:
            ValueError: The id can name no session.
            OSError: The disk refuses.
        """
        check_session_id(session_id)
        if pinned:
            write(self._root, FOLDER, session_id, b"")
        elif session_id in self:
            remove(self._root, FOLDER, session_id)

    def check(self, session_id: str) -> None:
        """Raise where a session may not be deleted.

        Raises:
            RequestError: It is pinned.
            OSError: The disk refuses.
        """
        if session_id in self:
            message = f"session {session_id!r} is pinned: unpin it before you delete it"
            raise RequestError(message, "session_id", "session_pinned", 409)


def saved_limits(root: Path, life: str) -> Retention:
    """What `save_limits` saved in this life; no limits where it saved none, or that cannot be read."""
    folder, name = _LIMITS
    for item in found(root, folder):
        try:
            if item.name == name:
                saved = json.loads(Path(item.path).read_bytes())
                return Retention(**saved["limits"]) if saved["life"] == life else Retention()
        except (OSError, ValueError, TypeError, KeyError):
            logger.exception("%s cannot be read: nothing is limited until an application starts", item.path)
    return Retention()


def save_limits(root: Path, life: str, retention: Retention) -> None:
    """Save limits for a store that comes back by itself; a disk that refuses, full as it may be, is logged.

    Args:
        root: The store's, absolute and no link.
        life: What no store has that was started anew: its operator may have chosen other limits.
        retention: The limits.
    """
    try:
        if retention != saved_limits(root, life):
            said = json.dumps({"life": life, "limits": asdict(retention)})
            write(root, *_LIMITS, said.encode())
    except OSError:
        logger.exception("the limits of %s are not saved: they hold until the store comes back by itself", root)
