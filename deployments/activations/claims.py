"""Room that is kept for runs of other nodes' writers, until the store is told of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

from deployments.activations.entries import RunName


class _Claim(NamedTuple):
    bytes: int
    since: float  # in the monotonic clock's seconds


class Claims:
    """The bytes of runs that are on their way. For one thread.

    Args:
        lease_s: Seconds after which a claim that was not renewed has ended: its writer is gone.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._claims: OrderedDict[RunName, _Claim] = OrderedDict()  # the longest without news first

    def put(self, name: RunName, size: int) -> None:
        """A run has, or is about to have, so many bytes in all."""
        self._claims[name] = _Claim(size, time.monotonic())
        self._claims.move_to_end(name)

    def renew(self, name: RunName) -> None:
        """A run goes on; one that has no claim is no error."""
        if claim := self._living().get(name):
            self.put(name, claim.bytes)

    def end(self, name: RunName) -> None:
        """A run is in a file that is known, or will not be finished; one that has no claim is no error."""
        self._claims.pop(name, None)

    def end_session(self, session_id: str) -> None:
        """The same of all runs of a session."""
        for name in [name for name in self._claims if name.session_id == session_id]:
            del self._claims[name]

    def of(self, name: RunName) -> int:
        """Bytes of one run."""
        claim = self._living().get(name)
        return claim.bytes if claim else 0

    def used(self, session_id: str | None = None) -> int:
        """Bytes of a session's runs, or of all."""
        return sum(claim.bytes for name, claim in self._living().items() if session_id in (None, name.session_id))

    def sessions(self) -> set[str]:
        """The sessions of the runs."""
        return {name.session_id for name in self._living()}

    def _living(self) -> OrderedDict[RunName, _Claim]:
        ended = time.monotonic() - self._lease_s
        while self._claims and next(iter(self._claims.values())).since <= ended:
            self._claims.popitem(last=False)
        return self._claims
