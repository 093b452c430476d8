"""The writer of a node other than the store's, in the directory that it shares with the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from deployments.activations.facts import FileUpdate, SessionName, StoreError
from deployments.activations.nodes.receiving import RunReceiver, awaited, end_process
from deployments.activations.writer.writer import Writer
from deployments.permissions import restrict

_REPORT_S = 60.0  # for which durable runs wait for the store to list them
_PAUSE_S = 0.5

logger = logging.getLogger(__name__)


class NodeWriter(RunReceiver):
    """Writes the runs of one node's replicas, and tells the store of each before it is answered.

    Args:
        root: The store's directory.
        store: The store's actor, which keeps the index and the limits.
    """

    def __init__(self, root: str, store: Any) -> None:
        self._root, self._store = Path(root).resolve(), store
        restrict(self._root)
        self._writer = Writer(self._root, None, report=self._report, on_failure=end_process)
        self._limited = True  # whether the store has quotas, as far as is known
        self._missed = False  # whether the store may not know all runs

    async def check_room(self, session: SessionName, size: int) -> None:
        """As `ActivationStore.check_room`."""
        await awaited(self._store.check_room.remote(session, size))

    async def end_runs(self, session: SessionName) -> None:
        """As `Writer.end_runs`."""
        await asyncio.wrap_future(self._writer.end_runs(session))

    async def _admit(self, session: SessionName, run_id: str, batches: Sequence[Any]) -> None:
        if not self._limited:
            return
        try:
            size = sum(batch.nbytes for batch in batches)
            self._limited = await awaited(self._store.make_room.remote(session, size))
        except (ray.exceptions.RayError, StoreError) as error:
            await self.abandon(session, run_id)
            raise StoreError(str(getattr(error, "cause", None) or error)) from error

    def _report(self, updates: Sequence[FileUpdate]) -> list[str]:
        """Tell the store what is durable; the paths of files that are gone.

        Where it does not answer, it finds the files later by itself.
        """
        bare = [update._replace(entries=[_bare(entry) for entry in update.entries]) for update in updates]
        until = time.monotonic() + _REPORT_S
        while True:
            try:
                gone: list[str]
                self._limited, gone = ray.get(self._store.add.remote(bare), timeout=_REPORT_S)
                if self._missed:
                    ray.get(self._store.look.remote(), timeout=_REPORT_S)
                    self._missed = False
                return gone
            except (ray.exceptions.RayError, TimeoutError) as error:
                if time.monotonic() >= until:
                    logger.warning("stored runs are not listed yet: the store does not answer (%s)", error)
                    self._missed = True
                    return []
                time.sleep(_PAUSE_S)


def _bare(entry: Any) -> Any:
    """A run without what only its file has."""
    return entry._replace(facts=replace(entry.facts, interventions=[], text=None))
