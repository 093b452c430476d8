"""The activation store as an actor: batches come by reference and end on disk, clients' tensor files beside them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Awaitable, Collection, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from deployments.activations.accounts import OPERATOR, Account
from deployments.activations.actors.client_files import KeepsFiles
from deployments.activations.facts import StoredPoint, StoredRun, StoreError
from deployments.activations.failures import explain
from deployments.activations.limits import Retention
from deployments.activations.nodes.releasing import releases_nodes
from deployments.activations.nodes.reporting import Reply
from deployments.activations.nodes.submitting import (
    Home,
    TakesRuns,
    actors,
    awaited,
    node_writers,
    open_returned,
    writer_on,
)
from deployments.activations.state.nodes import uri_of
from deployments.clusters import NAMESPACE, ON_HEAD, detached

if TYPE_CHECKING:
    from deployments.activations.archive.archive import Archive
    from deployments.activations.facts import Note
    from deployments.activations.state.nodes import Deletion, Node
    from deployments.activations.writer.writer import Writer

_ACTOR = "activation store of "  # what a store's name begins with
_ARCHIVE_S = 60.0  # for which an answer waits for its run to be archived
_WATCH_S = 2.0  # between two looks for nodes that have come back
_HOLD_S = 30.0  # for which a node's writer is waited for

logger = logging.getLogger(__name__)

__all__ = ["ActivationStore", "StoreError", "StoredPoint", "StoredRun"]


class Deleted(NamedTuple):
    """A session that was deleted; `away` names the nodes that delete their part of it when they come back."""

    away: tuple[str, ...] = ()


class ActivationStore(TakesRuns, KeepsFiles):
    """Keeps runs in Arrow files below one directory, and archives them to a bucket; `ActivationReader` reads them.

    Args:
        root: An absolute directory, made if it is missing.
        shard_bytes: A file of at least this length is sealed, and the next run begins another.
        open_shards: How many files stay open for more runs.
        lease_s: Seconds without a chunk after which a run that is not finished is abandoned.
        life: The same again where the store comes back by itself, which then keeps to its last limits.
        archive: The URI of the bucket that sealed segments are uploaded to; empty for none.
        archive_cache_bytes: The most bytes of segments that stay on the disk though they are in the bucket.

    Raises:
        ValueError: The directory or the bucket cannot be used, or another server uses the bucket.
    """

    def __init__(
        self,
        root: str,
        shard_bytes: int = 1 << 30,
        open_shards: int = 64,
        lease_s: float = 900,
        life: str = "",
        archive: str = "",
        archive_cache_bytes: int = 64 << 30,
    ) -> None:
        if "://" in root:
            raise ValueError(f"The activation store's root {root!r} must be a path; a bucket is named by archive")
        if not Path(root).is_absolute():
            # An actor's working directory may be a copy that Ray throws away.
            raise ValueError(f"The activation store's root {root!r} must be an absolute path")
        # Serve's controller and the ingress import this module too, and need no Arrow.
        from deployments.activations.archive.archive import check_bucket
        from deployments.activations.catalogue.catalogue import Catalogue
        from deployments.activations.files.permissions import restrict
        from deployments.activations.nodes.files import NodeSegments
        from deployments.activations.state.nodes import Nodes
        from deployments.activations.state.owners import Owners
        from deployments.activations.state.pins import Pins, saved_limits
        from deployments.activations.writer.opening import open_directory
        from deployments.activations.writer.recovery import make_root
        from deployments.activations.writer.room import Room

        restrict(Path(root))
        make_root(Path(root))
        resolved = Path(root).resolve()
        self._mark = open_directory(resolved)
        self._archive: Archive | None = None
        if archive:
            self._archive = _archive(resolved, archive, self._mark, archive_cache_bytes)
        else:
            check_bucket(resolved, None)
        self._catalogue = Catalogue.rebuild(resolved, self._archive.manifest if self._archive else None)
        self._limits = saved_limits(resolved, life)
        self._options: dict[str, Any] = {"shard_bytes": shard_bytes, "open_shards": open_shards, "lease_s": lease_s}
        self._root, self._asked, self._life = resolved, root, life
        self._code = code_version()
        self._limits_of = dict[str, Retention]()  # by application
        self._holds = uuid.uuid4().hex
        self._bucket = self._archive.place if self._archive else None
        self._owners = Owners(resolved)
        self._nodes = Nodes(resolved)
        self._watcher: threading.Thread | None = None
        self._archive_uri = archive or None
        if self._archive:
            self._archive.begin(self._catalogue, self._owners, NodeSegments(root, self._nodes))
        self._writer = self._begin_writer()
        self._deleting = asyncio.Lock()
        self._pins = Pins(resolved)
        self._keep_files(resolved)
        self._room = Room(resolved, lambda session_id, size: self._writing().check_quotas(session_id, size))
        self._room_pool = ThreadPoolExecutor(1, thread_name_prefix="room")  # one tries the disk at a time
        if self._nodes.all():
            self._watch()

    def _watch(self) -> None:
        """Look for nodes that come back, from now on."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=_watch, args=(weakref.ref(self),), name="nodes", daemon=True)
            self._watcher.start()

    def open_returned(self) -> None:
        """Open the directories of nodes that have come back.

        Raises:
            StoreError: The disk refuses.
            RayError: Ray does.
            ValueError: The store has no actor of its name.
        """
        self._nodes.mark_lost()
        known = [node for node in self._nodes.all().values() if not node.lost]
        away = {node.name: node.ray_id for node in known if not self._nodes.is_alive(node)}
        if away:
            store = ray.get_actor(_ACTOR + self._asked, namespace=NAMESPACE)
            open_returned(self._asked, store, self._archive_uri, away)

    def _begin_writer(self) -> Writer:
        from deployments.activations.writer.writer import Writer

        parts: dict[str, Any] = {"owners": self._owners, "archive": self._archive, "nodes": self._nodes}
        writer = Writer(self._root, self._catalogue, **parts, **self._options)
        writer.retain(self._limits)
        return writer

    async def code(self) -> str:
        """What tells the code that the store runs from another version's: it may be older than who asks."""
        return self._code

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

    async def delete(self, session_id: str, account: Account = OPERATOR) -> Deleted | None:
        """Delete a session; None if there is none that the account may change.

        Returns:
            What became of it: it is listed no more, and its files are gone, but for those of nodes that are away.

        Raises:
            StoreError: If `session_id` can name none, or the disk refuses.
            RequestError: It is pinned.
        """
        async with self._deleting:  # else the first one's end would let runs in beside the second
            return await self._delete(session_id, account)

    async def _delete(self, session_id: str, account: Account) -> Deleted | None:
        record = await asyncio.to_thread(self._owners.of, session_id)
        if not account.may_change(record and record.owner):
            return None
        await asyncio.to_thread(self._pins.check, session_id)  # before anybody lets go of it
        writers = await asyncio.to_thread(node_writers, self._asked)
        held = await _all(writer.hold.remote(session_id, record and record.fence) for writer in writers)
        for writer, said in zip(writers, held, strict=True):
            if isinstance(said, Exception):  # what it may still write there it will find gone
                logger.warning("%s does not let go of session %s: %s", writer, session_id, said)
        await _all(writer.flush.remote() for writer in writers)  # what was stored so far is known, and goes
        try:
            found = await asyncio.wrap_future(self._writing().delete(session_id, account))
        finally:
            for writer in writers:
                writer.release.remote(session_id)
        away = await self._delete_elsewhere(session_id)
        return Deleted(tuple(away)) if found or away else None

    async def _delete_elsewhere(self, session_id: str) -> list[str]:
        """Have nodes delete a session from their own directories; the names of those that do it when they come back."""
        nodes = await asyncio.to_thread(self._nodes.all)
        waiting = await asyncio.to_thread(self._nodes.waiting, session_id)
        asked = [(nodes[key], deletion) for key, deletion in waiting if key in nodes and not nodes[key].lost]
        done = await _all(self._deleted_on(node, deletion) for node, deletion in asked)
        for (node, _), said in zip(asked, done, strict=True):
            if isinstance(said, Exception):
                logger.warning("node %s deletes session %s when it comes back: %s", node.name, session_id, said)
        return sorted({node.name for (node, _), said in zip(asked, done, strict=True) if isinstance(said, Exception)})

    async def _deleted_on(self, node: Node, deletion: Deletion) -> None:
        if not await asyncio.to_thread(self._nodes.is_alive, node):
            raise StoreError("it is away")
        await writer_on(self._asked, node.ray_id).delete.remote(deletion)
        await asyncio.to_thread(self._end_deletions, node.key, [deletion.id])

    async def query(self, statement: str, values: Sequence[Any]) -> tuple[str, list[Any]]:
        """What the catalogue says, as `Catalogue.query`: for the reader, where it cannot read the database itself.

        Raises:
            StoreError: SQLite refuses the statement.
        """
        return await asyncio.to_thread(self._catalogue.query, statement, values)

    async def restore(self, uris: Sequence[str]) -> bool:
        """Fetch segments to the disk that are in the bucket alone, as `Archive.restore`: for the reader.

        Raises:
            StoreError: The bucket or the disk refuses.
        """
        try:
            return self._archive is not None and await asyncio.to_thread(self._archive.restore, uris)
        except OSError as error:
            raise explain(self._root, error) from error

    async def check_archive(self, archive: str) -> None:
        """Refuse an application that archives to another bucket than the store.

        Args:
            archive: The bucket's URI; empty for none.

        Raises:
            StoreError: It does; says what to do.
        """
        from deployments.activations.files.uris import place_of

        if (archive and place_of(archive).id) != (self._bucket.id if self._bucket else ""):
            raise StoreError(
                f"The activation store of {self._root} runs already and archives to {self._bucket or 'no bucket'}: "
                "start with the same archive, or stop Ray and start again"
            )

    async def wait_archived(self, uri: str) -> None:
        """Return once a segment is in the bucket.

        Args:
            uri: The segment's.

        Raises:
            StoreError: It is not within `_ARCHIVE_S`, or there is no bucket; says why.
        """
        if self._archive is None:
            raise StoreError("There is no archive: set archive=s3://bucket/prefix, or answer_when=stored.")
        try:
            archived = await asyncio.to_thread(self._archive.wait, uri)
            await asyncio.wait_for(asyncio.wrap_future(archived), _ARCHIVE_S)
        except TimeoutError:
            raise StoreError(
                f"The run is stored, but not in the bucket {self._bucket} within {_ARCHIVE_S:g} s "
                f"({self._archive.trouble}): it will be once the bucket takes it."
            ) from None

    async def place(self) -> Home:
        """Where the store is, for the writers of other nodes."""
        hold = self._holds if self._catalogue.is_kept else ""
        return Home(ray.get_runtime_context().get_node_id(), self._mark, hold, await asyncio.to_thread(releases_nodes))

    async def join(self, node: Node) -> Reply:
        """A node's writer has started, or could not reach the store for a while: it tells of its runs from now on.

        Args:
            node: The node; its key is empty where it writes into the store's own directory.

        Returns:
            What it is to delete before it tells of anything, and which of its files are known.

        Raises:
            StoreError: The disk refuses.
        """
        if not node.key:  # it may have stored runs before of which it had no time to tell
            await asyncio.to_thread(self._catalogue.look)
            return Reply(self._node_life(), {}, [], {})
        await asyncio.to_thread(self._nodes.join, node)
        self._watch()
        known = await asyncio.to_thread(self._catalogue.files_of, uri_of(node.key, ""))
        deletions = await asyncio.to_thread(self._nodes.deletions, node.key)
        if self._archive:
            self._archive.retry()
        return Reply(self._node_life(), {}, deletions, known)

    async def tell(self, key: str, notes: list[Note], deleted: list[int], asked: list[str]) -> Reply:
        """List runs that a node's writer has made durable, unless they were deleted since.

        Args:
            key: The node's.
            notes: The runs, by file.
            deleted: The deletions that the node has done, by their ids; it did them before these runs.
            asked: Sessions of which it is to say whether they may get more.

        Raises:
            StoreError: The disk refuses.
        """
        if deleted:
            await asyncio.to_thread(self._end_deletions, key, deleted)
        refused = await asyncio.wrap_future(self._writing().note(key, notes, asked))
        waiting = await asyncio.to_thread(self._nodes.deletions, key) if key else []
        return Reply(self._node_life(), refused, waiting)

    def _end_deletions(self, key: str, done: Collection[int]) -> None:
        """A node has deleted sessions: nothing of them is listed that a crash may have left."""
        for deletion in self._nodes.deletions(key):
            if deletion.id in done:
                self._catalogue.forget_files(uri_of(key, f"{deletion.session_id}/"))
        self._nodes.end_deletions(key, done)

    def _node_life(self) -> str:
        """Another one where nodes have to tell again of all that they have."""
        return f"{self._holds} {self._catalogue.is_kept}"

    async def pin(self, session_id: str, pinned: bool, account: Account = OPERATOR) -> bool:
        """Pin a session, or take its pin away: true when durable, false if there is none that the account may change.

        Raises:
            StoreError: As for `delete`.
        """
        return await asyncio.wrap_future(self._writing().pin(session_id, pinned, account))

    async def _agree(self, application: str, retention: Retention) -> Retention:
        """The limits that hold for all applications that run: those of owners are the strictest.

        Raises:
            StoreError: Another application that runs has set other limits, which are not of owners.
        """
        others = {name: limits for name, limits in self._limits_of.items() if name != application}
        for name in others.keys() - await asyncio.to_thread(_running, frozenset(others)):
            del self._limits_of[name]
        for name, limits in others.items():
            if name in self._limits_of and limits.of_all != retention.of_all:
                raise StoreError(
                    f"The activation store at {self._asked} keeps to the limits of the application "
                    f"{name!r}, {limits.of_all.said()}, and {application!r} has {retention.of_all.said()}: give "
                    "both the same, or this one another activations_dir."
                )
        self._limits_of[application] = retention
        return retention.with_owners_of(self._limits_of.values())

    async def retain(self, retention: Retention, now: float | None = None, application: str | None = None) -> list[str]:
        """Keep to these limits from now on, also when started again; as `Writer.retain`.

        Limits delete everybody's sessions: so one application does not change another's, as long as that runs.

        Args:
            retention: The limits.
            now: As `Writer.retain` takes it.
            application: Whose limits they are; None where they hold whoever has set others.

        Raises:
            StoreError: If the store is shutting down, or another application that runs has set other limits.
        """
        from deployments.activations.state.pins import save_limits

        if application is not None:
            retention = await self._agree(application, retention)
        self._limits = retention  # also those of a writer that takes the place of this one
        gone = asyncio.wrap_future(self._writing().retain(retention, now))
        await asyncio.get_running_loop().run_in_executor(
            self._files_pool, save_limits, self._root, self._life, retention
        )
        return await gone


def _running(applications: Set[str]) -> Set[str]:
    """Those of some applications that Serve runs."""
    if not applications:
        return frozenset()
    from ray import serve

    return applications & serve.status().applications.keys()


def _archive(root: Path, uri: str, name: str, cache_bytes: int) -> Archive:
    from deployments.activations.archive.archive import Archive
    from deployments.activations.files.uris import place_of

    return Archive(root, place_of(uri), name, cache_bytes)


async def _all(answers: Iterable[Awaitable[Any]]) -> list[Any]:
    """Each answer, or the exception that came in its place."""
    waited = [asyncio.wait_for(awaited(answer), _HOLD_S) for answer in answers]
    return await asyncio.gather(*waited, return_exceptions=True)


def _watch(of: weakref.ref[ActivationStore]) -> None:
    while (store := of()) is not None:
        try:
            if ray.is_initialized():  # else it is no actor
                store.open_returned()
        except (StoreError, ray.exceptions.RayError, ValueError):
            logger.exception("nodes that have come back are looked for again")
        del store
        time.sleep(_WATCH_S)


def connect(root: str, archive: str | None = None, archive_cache_bytes: int = 64 << 30) -> Any:
    """A handle to the actor that keeps `root`: one for all applications, made by whoever asks first.

    It is a named actor and no Serve deployment. Serve stops all deployments of an application at once, and
    this one has to outlive the requests that are being finished then. It needs no CPU, stays on the head node,
    whose disk the operator knows, and ends with the cluster. Its methods are awaited as `handle.name.remote()`.

    Args:
        root: The store's directory.
        archive: The URI of the bucket that it archives to, if it is made by this call.
        archive_cache_bytes: As for `ActivationStore`.
    """
    # Admission is the replicas' business: the store's own limit only stands above it.
    made = detached(ActivationStore, _ACTOR + root, max_concurrency=10_000, resources=ON_HEAD)
    life = uuid.uuid4().hex
    return made.remote(root, life=life, archive=archive or "", archive_cache_bytes=archive_cache_bytes)


@functools.cache
def code_version() -> str:
    """What tells the code of this package, as it was when it was first asked, from another version's."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


async def check_code(root: str, store: Any) -> None:
    """Warn of a store that runs other code than this process: it outlives an application, and so an update of it.

    It is not restarted here: that would fail other applications' runs that are under way.

    Raises:
        StoreError: Its code is older than any that says so, and this version's calls would fail.
    """
    advice = "restart Ray once no request records (stored runs stay)"
    try:
        code = await store.code.remote()
    except (ray.exceptions.RayTaskError, AttributeError) as error:
        if "code" not in str(error):
            raise
        raise StoreError(f"The activation store at {root} runs an earlier version's code: {advice}.") from error
    if code != code_version():
        logger.warning("the activation store at %s runs another version's code: %s", root, advice)


def running() -> list[str]:
    """The directories that the cluster's stores keep."""
    return [name.removeprefix(_ACTOR) for name in actors(_ACTOR)]
