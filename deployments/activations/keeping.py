"""Which sessions stay, and whether there is room for more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence, Set

import pyarrow as pa

from deployments.activations.deleting import begin_deletion, finish_deletion
from deployments.activations.entries import Known
from deployments.activations.facts import StoreError
from deployments.activations.objects import AnyRoot
from deployments.activations.pins import Pins
from deployments.activations.pool import Pool
from deployments.activations.retention import Held, Retention, oldest

logger = logging.getLogger(__name__)

Busy = Callable[[], Set[str]]
"""Gives the sessions that are being written to: these are not deleted by themselves."""


class Keeper:
    """Holds a store to its limits. For the writer's thread, but for `retention` and `pins`, which all may read.

    Attributes:
        retention: The limits.
        pins: The pinned sessions.
        alone: Held while a session is taken away from those there are.
    """

    def __init__(self, root: AnyRoot, catalogue: Known, pool: Pool) -> None:
        self.retention = Retention()
        self.pins = Pins(root)
        self.alone = threading.Lock()
        self._root = root
        self._catalogue = catalogue
        self._pool = pool

    def check(self, session_id: str, size: int, busy: Busy) -> list[Held]:
        """Find out whether a session may get more bytes.

        Args:
            session_id: The session.
            size: How many.
            busy: Which sessions stay in any case.

        Returns:
            The sessions that have to be deleted before.

        Raises:
            StoreError: It may not; the message names the quota and says what to do.
        """
        limits = self.retention
        most, used = limits.max_session_bytes, 0
        if most is not None and (used := self._pool.used(session_id)) + size > most:
            what = "store in another session, delete this one, or raise max_session_bytes"
            raise StoreError(_full(f"quota of session {session_id}", used, most, size, what))
        most = limits.max_store_bytes
        if most is None or (missing := (used := self._pool.used()) + size - most) <= 0:
            return []
        if limits.delete_oldest:
            going = oldest(self._deletable(busy() | {session_id}), missing)
            if sum(session.bytes for session in going) >= missing:
                return going
        what = "delete sessions that are not needed, or raise max_store_bytes"
        raise StoreError(_full("store's quota", used, most, size, what))

    def make_room(self, session_id: str, batches: Sequence[pa.RecordBatch], busy: Busy) -> None:
        """The same for these rows, and delete what has to be deleted.

        Raises:
            StoreError: There is no room.
            OSError: The disk refuses a deletion.
        """
        if not self.retention.has_quotas or not (size := sum(batch.nbytes for batch in batches)):
            return
        for session in self.check(session_id, size, busy):
            logger.warning("session %s is deleted: the store's quota is reached, and it is the oldest", session.id)
            self.delete(session.id)

    def expire(self, now: float, busy: Busy) -> list[str]:
        """Delete the sessions whose last run is too old, and say which they were; where the disk refuses, they stay.

        Args:
            now: Unix seconds.
            busy: Which sessions stay in any case.
        """
        age = self.retention.max_session_age_s
        if age is None:
            return []
        gone = list[str]()
        for session in self._deletable(busy()):
            if session.last < now - age:
                logger.warning("session %s is deleted: its last run is more than %g s old", session.id, age)
                try:
                    self.delete(session.id)
                    gone.append(session.id)
                except OSError:
                    logger.exception("session %s cannot be deleted", session.id)
        return gone

    def delete(self, session_id: str) -> bool:
        """Delete a session of which no run is open; false if there was none.

        Raises:
            OSError: The disk refuses.
        """
        self._pool.close(session_id)
        with self.alone:
            deletion = begin_deletion(self._root, session_id)
            known = self._catalogue.drop(session_id)
        self._pool.forget(session_id)
        if deletion:
            finish_deletion(deletion)
        return known or deletion is not None

    def pin(self, session_id: str, pinned: bool) -> bool:
        """Pin a session, or take its pin away; false if there is none.

        Raises:
            OSError: The disk refuses.
        """
        if not self._catalogue.knows(session_id) and (pinned or session_id not in self.pins):
            return False
        self.pins.set(session_id, pinned)
        return True

    def _deletable(self, busy: Set[str]) -> list[Held]:
        sizes = self._pool.sizes()
        return [
            Held(session_id, sizes[session_id], last)
            for session_id, last in self._catalogue.last_runs()
            if session_id not in busy and session_id not in self.pins
        ]


def _full(quota: str, used: int, most: int, size: int, what: str) -> str:
    return f"The {quota} is reached: {used} of {most} bytes are used, and {size} more do not fit: {what}."
