"""The activation store as an actor: batches come by reference and end on disk, clients' tensor files beside them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from deployments.activations.accounts import OPERATOR, Account
from deployments.activations.facts import StoredPoint, StoredRun, StoreError, store_name
from deployments.activations.failures import explain
from deployments.activations.keeps_files import KeepsFiles
from deployments.activations.reads_runs import ReadsRuns
from deployments.activations.retention import Retention
from deployments.activations.taking import NAMESPACE, TakesRuns, mark, node_writers

if TYPE_CHECKING:
    from deployments.activations.entries import Entry, StoredFile
    from deployments.activations.objects import AnyRoot
    from deployments.activations.writer import Writer

_ACTOR = "activation store of "  # what a store's name begins with
_HOLD_S = 30.0  # for which a node's writer is waited for

logger = logging.getLogger(__name__)

__all__ = ["ActivationStore", "StoreError", "StoredPoint", "StoredRun"]


class ActivationStore(TakesRuns, ReadsRuns, KeepsFiles):
    """Keeps runs in Arrow files below one directory, or in object storage.

    Args:
        root: An absolute directory, made if it is missing; or a URI of object storage, whose small files and catalogue
            lie on this machine.
        shard_bytes: A file of at least this length is sealed, and the next run begins another.
        open_shards: How many files stay open for more runs.
        lease_s: Seconds without a chunk after which a run that is not finished is abandoned.
        life: The same again where the store comes back by itself, which then keeps to its last limits.
    """

    def __init__(
        self,
        root: str,
        shard_bytes: int = 1 << 30,
        open_shards: int = 64,
        lease_s: float = 900,
        life: str = "",
    ) -> None:
        if root.startswith("file:"):
            raise ValueError(f"The activation store's root {root!r} must be a path, not a URI of one")
        if "://" not in root and not Path(root).is_absolute():
            # An actor's working directory may be a copy that Ray throws away.
            raise ValueError(f"The activation store's root {root!r} must be an absolute path")
        # Serve's controller and the ingress import this module too, and need no Arrow.
        from deployments.activations.catalogue import Catalogue
        from deployments.activations.objects import beside, place_of
        from deployments.activations.owners import Owners
        from deployments.activations.permissions import restrict
        from deployments.activations.pins import Pins, saved_limits
        from deployments.activations.readings import Readings
        from deployments.activations.recovering import make_root, recover
        from deployments.activations.room import Room

        resolved: AnyRoot = place_of(root) if "://" in root else Path(root)
        restrict(files := beside(resolved))
        if isinstance(resolved, Path):
            make_root(resolved)
            resolved = files = resolved.resolve()
        files.mkdir(parents=True, exist_ok=True)
        recover(resolved)
        self._catalogue = Catalogue.rebuild(resolved)
        self._limits = saved_limits(resolved, life)
        self._options: dict[str, Any] = {"shard_bytes": shard_bytes, "open_shards": open_shards, "lease_s": lease_s}
        self._root, self._asked, self._life = resolved, root, life
        self._owners = Owners(resolved)
        self._writer = self._begin_writer()
        self._deleting = asyncio.Lock()
        self._mark = mark(resolved) if isinstance(resolved, Path) else None
        self._rows_pool = ThreadPoolExecutor(2, thread_name_prefix="stored-rows")  # what they read is in memory at once
        self._readings = Readings(self._catalogue, resolved)
        self._pins = Pins(resolved)
        self._data_pool = ThreadPoolExecutor(2, thread_name_prefix="downloads")  # as many pages are in memory at once
        self._waiting = Counter[str | None]()
        self._keep_files(files)
        self._room = Room(resolved, lambda session_id, size: self._writing().check_quotas(session_id, size))
        self._room_pool = ThreadPoolExecutor(1, thread_name_prefix="room")  # one tries the disk at a time

    def _begin_writer(self) -> Writer:
        from deployments.activations.writer import Writer

        writer = Writer(self._root, self._catalogue, owners=self._owners, **self._options)
        writer.retain(self._limits)
        return writer

    async def check_room(self, session_id: str, size: int) -> None:
        """Find out whether a run can be stored now; nothing is kept free for it.

        Args:
            session_id: The session that it would belong to.
            size: The most bytes that it may have.

        Raises:
            StoreError: The disk refuses or has less room, or a quota has; the message says what to do.
        """
        await asyncio.get_running_loop().run_in_executor(self._room_pool, self._room.check, session_id, size)

    async def claim(self, session_id: str, account: Account) -> str:
        """Admit a request that records into a session; who comes first owns it, and that is durable when it answers.

        Returns:
            The session's fence, which the request's runs show.

        Raises:
            RequestError: The session is another's; 403.
            StoreError: The owner has too many sessions, or the disk refuses.
        """
        record = await asyncio.to_thread(self._owners.of, session_id)
        if record is not None and account.may_change(record.owner):
            return record.fence
        return await asyncio.wrap_future(self._writing().assign(session_id, account))

    async def share(self, session_id: str, shared: bool, account: Account) -> bool:
        """Let everybody read a session, or no more; answered as `pin`.

        Raises:
            StoreError: As for `delete`.
        """
        return await asyncio.wrap_future(self._writing().share(session_id, shared, account))

    async def delete(self, session_id: str, account: Account = OPERATOR) -> bool:
        """Delete a session: true when its files are gone, false if there is none that the account may change.

        Raises:
            StoreError: If `session_id` can name none, or the disk refuses.
            RequestError: It is pinned.
        """
        async with self._deleting:  # else the first one's end would let runs in beside the second
            return await self._delete(session_id, account)

    async def _delete(self, session_id: str, account: Account) -> bool:
        try:
            record = await asyncio.to_thread(self._owners.of, session_id)
            if not account.may_change(record and record.owner):
                return False
            await asyncio.to_thread(self._pins.check, session_id)  # before anybody lets go of it
        except OSError as error:
            raise explain(self._root, error) from error
        writers = await asyncio.to_thread(node_writers, self._asked)
        for writer, said in zip(writers, await _all(writer.hold.remote(session_id) for writer in writers), strict=True):
            if isinstance(said, Exception):  # what it may still write there it will find gone
                logger.warning("%s does not let go of session %s: %s", writer, session_id, said)
        try:
            return await asyncio.wrap_future(self._writing().delete(session_id, account))
        finally:
            for writer in writers:
                writer.release.remote(session_id)

    async def place(self) -> tuple[str, str | None]:
        """The store's node, and what marks its directory for other nodes; None of object storage."""
        return ray.get_runtime_context().get_node_id(), self._mark

    async def note(self, session_id: str, entries: Sequence[Entry], file: StoredFile) -> None:
        """List runs that another node's writer has made durable, unless they were deleted since."""
        await asyncio.wrap_future(self._writing().note(session_id, entries, file))

    async def make_room(self, session_id: str, run_id: str, size: int, most: int = 0, fence: str | None = None) -> None:
        """Make room for a run that another node's writer writes, as `Writer.claim`, until it is noted or abandoned.

        Args:
            session_id: The session.
            run_id: The run.
            size: Its bytes so far, with those that are about to be written.
            most: The most bytes that the whole run may have, 0 where that is not known.
            fence: As for `append`.

        Raises:
            StoreError: There is no room, or the session is another one by now; the message says what to do.
        """
        await asyncio.wrap_future(self._writing().claim(session_id, run_id, size, most, fence))

    async def pin(self, session_id: str, pinned: bool, account: Account = OPERATOR) -> bool:
        """Pin a session, or take its pin away: true when durable, false if there is none that the account may change.

        Raises:
            StoreError: As for `delete`.
        """
        return await asyncio.wrap_future(self._writing().pin(session_id, pinned, account))

    async def retain(self, retention: Retention, now: float | None = None) -> list[str]:
        """Keep to these limits from now on, also when started again; as `Writer.retain`.

        Raises:
            StoreError: If the store is shutting down.
        """
        from deployments.activations.pins import save_limits

        self._limits = retention  # also those of a writer that takes the place of this one
        gone = asyncio.wrap_future(self._writing().retain(retention, now))
        await asyncio.get_running_loop().run_in_executor(
            self._files_pool, save_limits, self._root, self._life, retention
        )
        return await gone


async def _all(answers: Iterable[Awaitable[Any]]) -> list[Any]:
    """Each answer, or the exception that came in its place."""
    waited = [asyncio.wait_for(_awaited(answer), _HOLD_S) for answer in answers]
    return await asyncio.gather(*waited, return_exceptions=True)


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def connect(root: str) -> Any:
    """A handle to the actor that keeps `root`: one for all applications, made by whoever asks first.

    It is a named actor and no Serve deployment. Serve stops all deployments of an application at once, and
    this one has to outlive the requests that are being finished then. It needs no CPU, stays on the head node,
    whose disk the operator knows, and ends with the cluster. Its methods are awaited as `handle.name.remote()`.
    """
    return (
        ray.remote(ActivationStore)
        .options(
            name=_ACTOR + store_name(root),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=10_000,  # admission is the replicas' business: this only stands above it
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
        )
        .remote(root, life=uuid.uuid4().hex)
    )


def running() -> list[str]:
    """The directories, or URIs without their keys, that the cluster's stores keep."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return [name.removeprefix(_ACTOR) for name in names if name.startswith(_ACTOR)]
