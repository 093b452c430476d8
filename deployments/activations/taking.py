"""How runs reach a writer over Ray: by reference, in parts, on the store's node or on a replica's own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.activations.facts import RunFacts, StoredRun, StoreError, store_name

if TYPE_CHECKING:  # Serve's controller and the ingress import this module too, and need no Arrow
    from deployments.activations.entries import Entry, StoredFile
    from deployments.activations.writer import Writer

NAMESPACE = "vitrine"
_MARK = ".store-id"  # no session id begins with '.'
_TOLD_S = 20.0  # that a commit waits for the store to list its runs
_PLACE_S = 60.0  # that a replica waits for a store that looks through its files
_KNOWN = 100_000  # runs that a node's writer remembers as stored

logger = logging.getLogger(__name__)


class TakesRuns:
    """What a replica sends its runs to."""

    _begin_writer: Callable[[], Writer]
    _writer: Writer

    def _writing(self) -> Writer:
        """The writer; another where it has ended by a fault, of which all who waited were told."""
        if not self._writer.alive:
            self._writer = self._begin_writer()
        return self._writer

    async def append(
        self,
        session_id: str,
        run_id: str,
        part: int,
        batches: list[ray.ObjectRef[Any]],
        most: int = 0,
        fence: str | None = None,
    ) -> None:
        """Take more of a run that is not finished; `write` takes its end. Not durable yet when it answers.

        Who waits for the answer before they send the next part sends no faster than the disk writes.

        Args:
            session_id: The session that the run belongs to.
            run_id: Unique within the session.
            part: How many parts of the run came before.
            batches: References to record batches of `to_batch` with the run's next rows, in a list so that
                Ray passes them on unresolved.
            most: The most bytes that the whole run may have, 0 where that is not known: no session is deleted to make
                room for a run that would not fit even so.
            fence: What the run's request was told of its session by `ActivationStore.claim`; None without keys.

        Raises:
            StoreError: If a batch is lost, parts before it are missing, the run or its session was given up, or
                the disk refuses. The run cannot be finished then.
        """
        found = await _fetch(run_id, batches)
        await asyncio.wrap_future(self._writing().append(session_id, run_id, part, found, most, fence))

    async def write(
        self, run: RunFacts, batches: list[ray.ObjectRef[Any]], part: int = 0, fence: str | None = None
    ) -> StoredRun:
        """Store a run, or the end of one: contiguous rows of one file, in order. Durable when it answers.

        Args:
            run: What the run is.
            batches: References as for `append`; may be empty only where there are parts before.
            part: How many parts were appended before.
            fence: As for `append`.

        Raises:
            StoreError: As for `append`, or if the batches do not fit together.
        """
        found = await _fetch(run.run_id, batches)
        return await asyncio.wrap_future(self._writing().submit(run, found, part, fence))

    async def abandon(self, session_id: str, run_id: str) -> None:
        """Remove what was appended of a run that will not be finished, and refuse what comes of it later.

        A run that is stored is kept; one that is not known is no error.

        Raises:
            StoreError: If the store is shutting down.
        """
        await asyncio.wrap_future(self._writing().abandon(session_id, run_id))


class NodeWriter(TakesRuns):
    """Writes the runs of one node's replicas, into files of its own, and tells the store of them."""

    def __init__(self, root: str, store: Any) -> None:
        """Begin to write.

        Args:
            root: As the store's, which this node sees as well.
            store: The store's handle.
        """
        from deployments.activations.objects import beside, place_of
        from deployments.activations.permissions import restrict
        from deployments.activations.writer import Writer

        self._store = store
        self._deletions = Counter[str]()  # by session, how many have begun
        at = place_of(root) if "://" in root else Path(root).resolve()
        restrict(beside(at))
        self._begin_writer = functools.partial(Writer, at, _Told(store))
        self._writer = self._begin_writer()

    async def append(
        self,
        session_id: str,
        run_id: str,
        part: int,
        batches: list[ray.ObjectRef[Any]],
        most: int = 0,
        fence: str | None = None,
    ) -> None:
        """As the store's, which makes room for each part."""
        found = await _fetch(run_id, batches)
        async with self._room(session_id, run_id, found, most, fence):
            await asyncio.wrap_future(self._writing().append(session_id, run_id, part, found, most))

    async def write(
        self, run: RunFacts, batches: list[ray.ObjectRef[Any]], part: int = 0, fence: str | None = None
    ) -> StoredRun:
        """As the store's, which makes room."""
        found = await _fetch(run.run_id, batches)
        async with self._room(run.session_id, run.run_id, found, fence=fence):
            return await asyncio.wrap_future(self._writing().submit(run, found, part))

    async def abandon(self, session_id: str, run_id: str) -> None:
        """As the store's, which keeps no room for the run any more."""
        await super().abandon(session_id, run_id)
        self._store.abandon.remote(session_id, run_id)

    async def check_room(self, session_id: str, size: int) -> None:
        """As the store's."""
        await _unless_away(self._store.check_room.remote(session_id, size))

    @contextlib.asynccontextmanager
    async def _room(
        self, session_id: str, run_id: str, batches: Sequence[Any], most: int = 0, fence: str | None = None
    ) -> AsyncIterator[None]:
        """Have room for more of a run; the run cannot be finished where this, or what is done within, fails."""
        size = self._writer.bytes_of(session_id, run_id) + sum(batch.nbytes for batch in batches)
        try:
            deletions = self._deletions[session_id]
            await _unless_away(self._store.make_room.remote(session_id, run_id, size, most, fence))
            if self._deletions[session_id] != deletions:  # what the store said is of the session before
                raise StoreError(f"Session {session_id} was deleted while the run went on: send the request again.")
            yield
        except BaseException:
            self._store.abandon.remote(session_id, run_id)
            raise

    async def hold(self, session_id: str) -> None:
        """Let go of a session's files, and take no run of it until `release`, or for a minute or two."""
        self._deletions[session_id] += 1
        await asyncio.wrap_future(self._writing().hold(session_id))

    async def release(self, session_id: str) -> None:
        """Take runs of the session again."""
        await asyncio.wrap_future(self._writing().release(session_id))


class _Told:
    """Stands for the catalogue, which is on the store's node."""

    looks = 0

    def __init__(self, store: Any) -> None:
        self._store = store
        self._untold: deque[tuple[str, list[Entry], StoredFile]] = deque()
        self._own: OrderedDict[tuple[str, str], None] = OrderedDict()  # the oldest first

    def add(self, session_id: str, entries: Iterable[Entry], file: StoredFile) -> int:
        told = [entry._replace(facts=replace(entry.facts, interventions=[], text=None)) for entry in entries]
        self._untold.append((session_id, told, file))
        # It may be starting again, and have looked at this file before the runs were in it.
        note = self._store.note.options(max_task_retries=-1)
        while self._untold:
            try:
                note.remote(*self._untold[0]).future().result(timeout=_TOLD_S)
            except ray.exceptions.RayTaskError:  # it will never take it
                logger.exception("the store refuses to list runs of %s, which are on disk", self._untold[0][2].uri)
            except (ray.exceptions.RayError, TimeoutError):
                logger.exception("the store is not told of runs of session %s yet, which are on disk", session_id)
                break
            self._untold.popleft()
        self._own.update(dict.fromkeys((session_id, entry.facts.run_id) for entry in told))
        while len(self._own) > _KNOWN:
            self._own.popitem(last=False)
        return 0

    def holds(self, session_id: str, run_id: str) -> bool:
        return (session_id, run_id) in self._own

    # What follows is the store's own business: it alone deletes, and counts what all writers have written.

    def drop(self, session_id: str) -> bool:
        raise AssertionError(f"session {session_id}: the store alone deletes")

    def knows(self, session_id: str) -> bool:
        raise AssertionError(f"session {session_id}: the store alone pins")

    def sizes(self, but: Collection[str] = ()) -> dict[str, int]:
        return {}

    def files(self, session_id: str) -> dict[str, int]:
        return {}

    def last_runs(self) -> list[tuple[str, float]]:
        return []

    def look(self) -> None:
        raise AssertionError("the store alone looks at the files of all")


def mark(root: Path) -> str:
    """What tells a store's directory from any other, also from another node; made if it is missing.

    A disk that refuses it leaves one that no other node finds: then all send their runs to the store.
    """
    from deployments.activations.small_files import write

    try:
        if not (root / _MARK).exists():
            write(root, ".", _MARK, secrets.token_hex(16).encode())
        return (root / _MARK).read_text()
    except OSError:
        logger.exception("%s cannot be marked: runs of other nodes go over the network", root)
        return secrets.token_hex(16)


def connect_writer(root: str, store: Any) -> Any:
    """Who takes this node's runs.

    On the store's own node that is the store, and where the node does not see its directory: then rows go there
    over the network. Elsewhere it is a writer of the node, one for all its replicas.

    Args:
        root: The store's.
        store: Its handle.
    """
    node = ray.get_runtime_context().get_node_id()
    try:
        home, marked = ray.get(store.place.remote(), timeout=_PLACE_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        logger.exception("the activation store does not say where it is: runs of this node go there over the network")
        return store
    if node == home or (marked is not None and not _sees(Path(root), marked)):
        return store
    return (
        ray.remote(NodeWriter)
        .options(
            name=f"{_named(root)} {node}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=10_000,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(root, store)
    )


def node_writers(root: str) -> list[Any]:
    """The handles of all nodes' writers of a store."""
    names = [item["name"] for item in ray.util.list_named_actors(all_namespaces=True) if item["namespace"] == NAMESPACE]
    found = []
    for name in names:
        if name.startswith(_named(root)):
            try:
                found.append(ray.get_actor(name, namespace=NAMESPACE))
            except ValueError:
                continue  # it has ended meanwhile, and its node with it
    return found


def _named(root: str) -> str:
    return f"activation writer of {store_name(root)} on"


def _sees(root: Path, marked: str) -> bool:
    try:
        return (root / _MARK).read_text() == marked
    except OSError:
        return False


async def _unless_away(asked: Awaitable[None]) -> None:
    try:
        await asked
    except ray.exceptions.ActorUnavailableError:
        logger.warning("the store starts again, and its quotas are not asked")


async def _fetch(run_id: str, batches: Sequence[ray.ObjectRef[Any]]) -> list[Any]:
    try:
        return await asyncio.gather(*batches)
    except ray.exceptions.RayError as error:
        raise StoreError(
            f"The activations of run {run_id} were lost before they were stored "
            f"({type(error).__name__}): send the request again."
        ) from error
