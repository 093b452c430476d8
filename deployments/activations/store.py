"""The activation store as an actor: batches come by reference and end on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray

from deployments.activations.facts import RunFacts, StoredPoint, StoredRun, StoreError

__all__ = ["ActivationStore", "StoreError", "StoredPoint", "StoredRun"]


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
        # Serve's controller and the ingress import this module too, and need no Arrow.
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

    async def check_health(self) -> None:
        """Raise RuntimeError if nothing can be written any more until the actor is replaced."""
        if not self._writer.alive:
            raise RuntimeError("The activation store's writer thread has ended")


def connect(root: str) -> Any:
    """A handle to the actor that keeps `root`: one for all applications, made by whoever asks first.

    It is a named actor and no Serve deployment. Serve stops all deployments of an application at once, and
    this one has to outlive the requests that are being finished then. It needs no CPU, stays on the head node,
    whose disk the operator knows, and ends with the cluster. Its methods are awaited as `handle.name.remote()`.
    """
    return (
        ray.remote(ActivationStore)
        .options(
            name=f"activation store of {root}",
            namespace="vitrine",
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=10_000,  # admission is the replicas' business: this only stands above it
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
        )
        .remote(root)
    )
