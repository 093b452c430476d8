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

from deployments.activations.facts import RunFacts, StoredRun, StoreError
from deployments.activations.failures import explain
from deployments.clusters import NAMESPACE

if TYPE_CHECKING:  # Serve's controller and the ingress import this module too, and need no Arrow
    from deployments.activations.entries import Entry, StoredFile
    from deployments.activations.writer import Writer

_MARK = ".store-id"  # no session id begins with '.'
_TOLD_S = 20.0  # that a commit waits for the store to list its runs
_PLACE_S = 60.0  # that a replica waits for a store that looks through its files
_ASK_S = 10.0  # that a run waits for a store that starts
_KNOWN = 100_000  # runs that a node's writer remembers as stored

_Where = tuple[str, str, str]  # as `ActivationStore.place` says it

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
        self,
        run: RunFacts,
        batches: list[ray.ObjectRef[Any]],
        part: int = 0,
        fence: str | None = None,
        archived: bool = False,
    ) -> StoredRun:
        """Store a run, or the end of one: contiguous rows of one file, in order. Durable when it answers.

        Args:
            run: What the run is.
            batches: References as for `append`; may be empty only where there are parts before.
            part: How many parts were appended before.
            fence: As for `append`.
            archived: Whether to answer only when it is in the bucket, too.

        Raises:
            StoreError: As for `append`, or if the batches do not fit together; or the run is stored, and not archived
                in time.
        """
        found = await _fetch(run.run_id, batches)
        stored = await asyncio.wrap_future(self._writing().submit(run, found, part, fence))
        if archived:
            await self._until_archived(stored)
        return stored

    async def _until_archived(self, stored: StoredRun) -> None:
        await asyncio.wrap_future(self._writing().seal(stored.session_id))
        await self.wait_archived(next(iter(stored.points.values())).uri)

    async def wait_archived(self, uri: str) -> None:
        """Return once a segment is in the bucket, as `ActivationStore.wait_archived`."""
        raise NotImplementedError

    async def abandon(self, session_id: str, run_id: str) -> None:
        """Remove what was appended of a run that will not be finished, and refuse what comes of it later.

        A run that is stored is kept; one that is not known is no error.

        Raises:
            StoreError: If the store is shutting down.
        """
        await asyncio.wrap_future(self._writing().abandon(session_id, run_id))

    async def renew(self, session_id: str, run_id: str) -> None:
        """Keep what was appended of a run that goes on, though nothing of it may come for a while.

        Raises:
            StoreError: If the store is shutting down.
        """
        await asyncio.wrap_future(self._writing().renew(session_id, run_id))


class NodeWriter(TakesRuns):
    """Writes the runs of one node's replicas, into files of its own, and tells the store of them."""

    def __init__(self, root: str, store: Any) -> None:
        """Begin to write.

        Args:
            root: As the store's, which this node sees as well.
            store: The store's handle.
        """
        from deployments.activations.permissions import restrict
        from deployments.activations.writer import Writer

        self._store = store
        self._deletions = Counter[str]()  # by session, how many have begun
        restrict(at := Path(root).resolve())
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
        self,
        run: RunFacts,
        batches: list[ray.ObjectRef[Any]],
        part: int = 0,
        fence: str | None = None,
        archived: bool = False,
    ) -> StoredRun:
        """As the store's, which makes room."""
        found = await _fetch(run.run_id, batches)
        async with self._room(run.session_id, run.run_id, found, fence=fence):
            stored = await asyncio.wrap_future(self._writing().submit(run, found, part))
        if archived:
            await self._until_archived(stored)
        return stored

    async def wait_archived(self, uri: str) -> None:
        """As the store's, which archives what all writers seal."""
        await self._store.wait_archived.remote(uri)

    async def abandon(self, session_id: str, run_id: str) -> None:
        """As the store's, which keeps no room for the run any more."""
        await super().abandon(session_id, run_id)
        self._store.abandon.remote(session_id, run_id)

    async def renew(self, session_id: str, run_id: str) -> None:
        """As the store's, which keeps its room for the run."""
        await super().renew(session_id, run_id)
        self._store.renew.remote(session_id, run_id)

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

    def add_all(self, added: Sequence[tuple[str, Sequence[Entry], StoredFile]]) -> None:
        for session_id, entries, file in added:
            self.add(session_id, entries, file)

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

    def last_runs(self, session_id: str | None = None) -> list[tuple[str, float]]:
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
    over the network. Elsewhere it is a writer of the node, one for all its replicas. Where the store does not answer
    yet, each run asks again, and fails with the reason until it does.

    Args:
        root: The store's.
        store: Its handle.

    Raises:
        StoreError: Locks on the directory hold on each node alone; the message says what to do.
    """
    node = ray.get_runtime_context().get_node_id()
    try:
        place = ray.get(store.place.remote(), timeout=_PLACE_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        logger.exception("the activation store does not say where it is: runs of this node fail until it does")
        return LateWriter(root, store, node)
    if _writes_itself(root, node, place):
        _check_locks(Path(root), place, lambda: ray.get(store.place.remote(), timeout=_PLACE_S))
        return _writer_of(root, store, node)
    return store


class LateWriter:
    """Stands for who takes a node's runs while the store does not say where it is: each call asks again.

    Its methods are those of `TakesRuns`, awaited as `writer.name.remote()`.
    """

    def __init__(self, root: str, store: Any, node: str) -> None:
        self._root = root
        self._store = store
        self._node = node
        self._found: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _LateMethod(self, name)

    async def _call(self, name: str, *args: Any) -> Any:
        if self._found is None:
            self._found = await self._find()
        return await getattr(self._found, name).remote(*args)

    async def _find(self) -> Any:
        try:
            place = await asyncio.wait_for(_awaited(self._store.place.remote()), _ASK_S)
            if not _writes_itself(self._root, self._node, place):
                return self._store
            again = await asyncio.wait_for(_awaited(self._store.place.remote()), _ASK_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            reason = str(error) or f"no answer in {_ASK_S:g} s"
            raise StoreError(f"The activation store has not started ({reason}): send the request again.") from error
        _check_locks(Path(self._root), place, lambda: again)
        return _writer_of(self._root, self._store, self._node)


class _LateMethod:
    def __init__(self, writer: LateWriter, name: str) -> None:
        self._writer = writer
        self._name = name

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        called = asyncio.ensure_future(self._writer._call(self._name, *args))
        if self._name in ("abandon", "renew"):  # which nobody awaits
            called.add_done_callback(lambda done: done.cancelled() or done.exception())
        return called


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _writes_itself(root: str, node: str, place: _Where) -> bool:
    """Whether a node has a writer of its own: it is not the store's, and sees its directory."""
    home, marked, _ = place
    return node != home and _sees(Path(root), marked)


def _check_locks(root: Path, place: _Where, again: Callable[[], _Where]) -> None:
    """Refuse a directory whose locks hold on each node alone: a store that starts would cut off another node's files.

    Args:
        root: The store's.
        place: What the store said before.
        again: Asks it again: where it is the same one, it has held its lock all the while.

    Raises:
        StoreError: This node can take the lock that the store holds.
    """
    from deployments.activations.database import can_hold

    if not place[2]:  # the store holds no lock
        return
    try:
        taken = can_hold(root)
    except OSError as error:
        raise explain(root, error) from error
    if taken and again() == place:
        raise StoreError(
            f"Locks on {root} hold on each node alone, and nodes that share it would cut off each other's files: mount "
            "it with locks that hold on all nodes (NFS 4 without local_lock, Lustre with flock), or give the nodes "
            "directories that they do not share."
        )


def _writer_of(root: str, store: Any, node: str) -> Any:
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


def actors(prefix: str) -> list[str]:
    """The names of the cluster's actors that begin so."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in found if one["namespace"] == NAMESPACE and one["name"].startswith(prefix)]


def node_writers(root: str) -> list[Any]:
    """The handles of all nodes' writers of a store."""
    found = []
    for name in actors(_named(root)):
        try:
            found.append(ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            continue  # it has ended meanwhile, and its node with it
    return found


def _named(root: str) -> str:
    return f"activation writer of {root} on"


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
