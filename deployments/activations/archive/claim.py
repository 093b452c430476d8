"""The claim to a bucket: only one server at a time may archive there.

Buckets have no conditional write. So each server writes a claim under its own name, `<bucket>/.claims/<name>`, lists
all claims, and begins only if no other is live. Of two servers that begin at the same moment, each sees the other's
claim, and neither begins. Times are the bucket's.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from deployments.activations.files.places import Place

FOLDER = ".claims"  # no session id begins with '.'
EVERY_S = 10.0  # between two heartbeats
STALE_S = 60.0  # without a heartbeat after which a claim is void

logger = logging.getLogger(__name__)


class InUseError(ValueError):
    """Another server archives to the bucket; the message says where it runs and what to do."""


class BucketClaim:
    """One server's claim to a bucket; a server that starts again has the same name, and its claim."""

    def __init__(self, place: Place, name: str) -> None:
        self._place = place
        self._folder = place.below(FOLDER)
        self._file = self._folder.file(name)
        self._until = 0.0  # on `_now`'s clock; the claim is this server's until then
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        """Whether no other server can have begun meanwhile."""
        return _now() < self._until

    def acquire(self) -> None:
        """Claim the bucket for `STALE_S`; InUseError if another server has it, OSError if it refuses."""
        began = _now()
        before = {info.base_name: info for info in self._folder.infos()}
        own = before.get(self._file.name)
        said = _read(self._file.read()) if own else {}
        self._write()
        claims = {info.base_name: info for info in self._folder.infos()}
        now = claims[self._file.name].mtime
        if own and said.get("host") not in (None, socket.gethostname()) and _is_live(own.mtime, now):
            raise self._in_use(said)  # it writes again soon, if it lives: a copy of this server's directory
        for name, info in claims.items():
            if name != self._file.name and _is_live(info.mtime, now):
                said = _read(self._folder.file(name).read())
                self._file.remove()
                raise self._in_use(said)
        self._until = began + STALE_S

    def begin(self, lost: Callable[[], None]) -> None:
        """Renew the claim every `EVERY_S` on a thread, which calls `lost` while it is not held."""

        def beat() -> None:
            while not self._ending.wait(EVERY_S):
                if not self.is_held:
                    lost()
                    continue
                began = _now()
                try:
                    self._write()
                except OSError as error:
                    logger.warning("the claim to %s cannot be renewed: %s", self._place, error)
                else:
                    if self.is_held:  # the process may have been paused in between
                        self._until = began + STALE_S

        self._thread = threading.Thread(target=beat, name="bucket-claim", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the claim up, so that another server may begin at once."""
        self._ending.set()
        if self._thread:
            self._thread.join()
        if self.is_held:
            self._until = 0.0
            try:
                self._file.remove()
            except OSError:
                logger.warning("the claim to %s stays until it is stale", self._place)

    def _write(self) -> None:
        said = {"host": socket.gethostname(), "pid": os.getpid()}
        self._file.write(json.dumps(said).encode())

    def _in_use(self, said: dict[str, Any]) -> InUseError:
        return InUseError(
            f"another server archives to {self._place}, on {said.get('host', 'an unknown host')} (process "
            f"{said.get('pid', 'unknown')}): stop it, or give this one another bucket or prefix; if it is gone, "
            f"start again {STALE_S:g} s after it ended"
        )


def _is_live(written: datetime, now: datetime) -> bool:
    return (now - written).total_seconds() < STALE_S


def _read(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError):
        return {}


def _now() -> float:
    """A clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
