"""The activation store as a Ray Serve deployment: batches come by reference and end on disk."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve

from deployments.activations.facts import RunFacts, StoredPoint, StoredRun, StoreError

__all__ = ["ActivationStore", "StoreError", "StoredPoint", "StoredRun"]


# Disk work needs no CPU of its own. Admission is the replicas' business: the limit only stands above it.
@serve.deployment(num_replicas=1, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
class ActivationStore:
    """Keeps runs in append-only Arrow files below one directory.

    Args:
        root: An absolute directory; made if it is missing.
        shard_bytes: A file of at least this length is sealed, and the next run begins another.
        open_shards: How many files stay open for more runs.
    """

    def __init__(self, root: str, shard_bytes: int = 1 << 30, open_shards: int = 64) -> None:
        if not Path(root).is_absolute():
            # An actor's working directory may be a copy that Ray throws away.
            raise ValueError(f"The activation store's root {root!r} must be an absolute path")
        # Serve's controller and proxies import this module too, and need no Arrow.
        from deployments.activations.catalogue import Catalogue
        from deployments.activations.writer import Writer

        Path(root).mkdir(parents=True, exist_ok=True)
        resolved = Path(root).resolve()
        self._catalogue = Catalogue.rebuild(resolved)
        self._writer = Writer(resolved, self._catalogue, shard_bytes=shard_bytes, open_shards=open_shards)

    async def write(self, run: RunFacts, batches: list[ray.ObjectRef[Any]]) -> StoredRun:
        """Store one run: its batches in order, as contiguous rows of one file. Durable when it answers.

        Args:
            run: What the run is.
            batches: References to record batches of `to_batch`, in a list so that Ray passes them on
                unresolved.

        Raises:
            StoreError: If a batch is lost, the batches do not fit together, or the disk refuses.
        """
        try:
            found = await asyncio.gather(*batches)
        except ray.exceptions.RayError as error:
            raise StoreError(
                f"The activations of run {run.run_id} were lost before they were stored "
                f"({type(error).__name__}): send the request again."
            ) from error
        return await asyncio.wrap_future(self._writer.submit(run, found))

    async def sessions(self, limit: int = 100, after: str | None = None) -> list[dict[str, Any]]:
        """Up to `limit` sessions in the order of their ids, beginning behind the id `after`."""
        return self._catalogue.sessions(limit, after)

    async def session(self, session_id: str) -> dict[str, Any] | None:
        """One session with its runs and files; None if there is none."""
        return self._catalogue.session(session_id)

    async def delete(self, session_id: str) -> bool:
        """Delete a session: true when its files are gone, false if there was none.

        Raises:
            StoreError: If `session_id` can name none, or the disk refuses.
        """
        return await asyncio.wrap_future(self._writer.delete(session_id))

    def check_health(self) -> None:
        """Raise RuntimeError if nothing can be written any more until the actor is replaced."""
        if not self._writer.alive:
            raise RuntimeError("The activation store's writer thread has ended")

    def __del__(self) -> None:
        # Serve calls this when it ends the replica, so that open files get their footers. There is no
        # writer where the constructor failed, and none answers any more while the interpreter ends.
        if hasattr(self, "_writer") and not sys.is_finalizing():
            self._writer.close()
