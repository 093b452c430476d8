"""The activation store in the test's own process, for replicas without actors."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from deployments.activations.actors.reader import ActivationReader
from deployments.activations.actors.store import ActivationStore
from deployments.activations.facts import RunEnd
from deployments.activations.segments.schema import Packed


class Handle:
    """The real store and its reader, called as an actor's handle is."""

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._reader = ActivationReader(store._asked)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store if hasattr(self._store, name) else self._reader, name)

        def remote(*args: Any) -> asyncio.Future[Any]:
            return asyncio.ensure_future(method(*map(_arrived, args)))

        return type("Method", (), {"remote": staticmethod(remote)})


def _arrived(argument: Any) -> Any:
    """What an actor gets in place of an argument."""
    if not isinstance(argument, list):
        return argument
    if any(isinstance(one, RunEnd) for one in argument):
        return [end._replace(batches=_arrived(end.batches)) for end in argument]
    return [copy.copy(one) if isinstance(one, Packed) else one for one in argument]
