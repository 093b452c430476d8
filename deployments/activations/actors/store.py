"""The activation store as an actor: stores runs, whose batches come by reference, and clients' tensor files.

More than 300 lines, because Ray calls one class: everything that others ask of the store is a method of it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import ray

from deployments.accounts import OPERATOR, Account
from deployments.activations.facts import StoreError, explained
from deployments.activations.limits import Retention
from deployments.activations.nodes.cluster import actors, node_writers, releases_nodes
from deployments.activations.nodes.receiving import Home, RunReceiver, awaited
from deployments.activations.nodes.reporting import Reply
from deployments.activations.nodes.submitting import open_returned
from deployments.activations.state.nodes import node_of, uri_of
from deployments.clusters import NAMESPACE, ON_HEAD, detached

if TYPE_CHECKING:
    from deployments.activations.facts import FileUpdate
    from deployments.activations.state.nodes import Node
    from deployments.activations.writer.retention import SessionManager
    from deployments.activations.writer.writer import Writer

_T = TypeVar("_T")
_ACTOR = "activation store of "  # what a store's name begins with
_WATCH_S = 2.0  # between two looks for nodes that have come back
_FLUSH_S = 30.0  # for which a node's writer is waited for
_WITHDRAW_S = 10.0  # the same, while a request waits
_START_PAUSE_S = 1.0  # before a store that came back by itself, and could not start, is started again

logger = logging.getLogger(__name__)


class Deleted(NamedTuple):
    """A session that was deleted; `away` names the nodes that delete their part of it when they come back."""

    away: tuple[str, ...] = ()


class ActivationStore(RunReceiver):
    """Keeps runs in Arrow files below one absolute directory, and archives them to a bucket.

    Clients' files and profiles, too. `life` is the same again where the store comes back by itself, which then keeps to
    its last limits; `archive` is the URI of the bucket, of which at most `archive_cache_bytes` stay on the disk. All
    methods raise StoreError where the disk refuses; the constructor a ValueError if the directory or the bucket cannot
    be used. A store that comes back by itself starts again until it can.
    """

    def __init__(self, root: str, life: str = "", archive: str = "", archive_cache_bytes: int = 64 << 30) -> None:
        try:
            self._open(root, life, archive, archive_cache_bytes)
        except Exception:  # whatever it is: an actor whose constructor raises is never restarted, one that dies is
            if not _is_restarted():
                raise
            logger.exception("the activation store of %s starts again", root)
            time.sleep(_START_PAUSE_S)
            os._exit(1)

    def _open(self, root: str, life: str, archive: str, archive_cache_bytes: int) -> None:
        if "://" in root:
            raise ValueError(f"The activation store's root {root!r} must be a path; a bucket is named by archive")
        if not Path(root).is_absolute():
            # An actor's working directory may be a copy that Ray throws away.
            raise ValueError(f"The activation store's root {root!r} must be an absolute path")
        # Serve's controller and the ingress import this module too, and need no Arrow.
        from deployments.activations.archive.archive import Archive, check_bucket
        from deployments.activations.catalogue.catalogue import Catalogue
        from deployments.activations.files.places import place_of
        from deployments.activations.nodes.files import NodePlace
        from deployments.activations.state.nodes import Nodes
        from deployments.activations.state.owners import Owners
        from deployments.activations.state.state import Pins, saved_limits
        from deployments.activations.writer.recovery import open_directory
        from deployments.activations.writer.room import DiskCheck
        from deployments.client_data.profiles import StoredProfiles
        from deployments.client_data.readouts import ReadoutFiles
        from deployments.client_data.tensors import TensorFiles
        from deployments.permissions import restrict

        restrict(Path(root))
        self._asked, self._root, self._life = root, Path(root).resolve(), life
        self._code = code_version()
        self._mark, self._heartbeat = open_directory(self._root)
        self._archive: Archive | None = None
        self._archive_uri = archive or None
        if archive:
            self._archive = Archive(self._root, place_of(archive), self._mark, archive_cache_bytes)
        else:
            check_bucket(self._root, None)
        self._catalogue = Catalogue.rebuild(self._root, self._archive.manifest if self._archive else None)
        self._limits, self._limits_of = saved_limits(self._root, life)  # the latter by application
        self._holds = uuid.uuid4().hex
        self._owners, self._nodes, self._pins = Owners(self._root), Nodes(self._root), Pins(self._root)
        if self._archive:
            self._archive.begin(self._catalogue, self._owners, NodePlace(root, self._nodes))
        self._writer = self._begin_writer()
        self._deleting = weakref.WeakValueDictionary[str, asyncio.Lock]()  # by session
        self._room = DiskCheck(self._root)
        self._client_data: dict[str, Any] = {"tensors": TensorFiles(self._root), "readouts": ReadoutFiles(self._root)}
        self._client_data["profiles"] = StoredProfiles(self._root)
        self._files_pool = ThreadPoolExecutor(1, thread_name_prefix="small-files")  # one changes them at a time
        self._look_pool = ThreadPoolExecutor(1, thread_name_prefix="look")
        self._look: Future[None] | None = None  # the last one through the directory
        self._watcher: threading.Thread | None = None
        if self._nodes.all():
            self._watch()

    def _begin_writer(self) -> Writer:
        from deployments.activations.writer.writer import Writer

        writer = Writer(self._root, self._catalogue, owners=self._owners, archive=self._archive, nodes=self._nodes)
        writer.retain(self._limits)
        return writer

    async def _ask(self, work: Callable[[SessionManager], _T]) -> _T:
        """What the writer's `SessionManager` does in the writer's turn."""
        return await asyncio.wrap_future(self._writing().ask(work))

    async def code(self) -> str:
        """The version of the code that the store runs, which may be older than the caller's."""
        return self._code

    # ---- sessions; an account that may not change one is answered as if there were none

    async def check_room(self, session_id: str, size: int) -> None:
        """Raise StoreError if a run of `size` bytes cannot be stored now; nothing is kept free for it."""
        if self._writing().has_quotas:
            await self._ask(lambda manager: manager.check(session_id, size))
        await self._room.check(size)

    async def claim(self, session_id: str, account: Account) -> str:
        """As `Owners.claim`: admit a request that records into a session, whose fence its runs show."""
        record = await asyncio.to_thread(self._owners.of, session_id)
        if record is not None and account.may_change(record.owner):
            return record.fence
        return await self._ask(lambda manager: manager.assign(session_id, account))

    async def share(self, session_id: str, shared: bool, account: Account) -> bool:
        """Let everybody read a session, or no more: true when durable, false if there is none."""
        return await self._ask(lambda manager: manager.share(session_id, shared, account))

    async def pin(self, session_id: str, pinned: bool, account: Account = OPERATOR) -> bool:
        """Pin a session, or take its pin away; answered as `share`."""
        return await self._ask(lambda manager: manager.pin(session_id, pinned, account))

    async def delete(self, session_id: str, account: Account = OPERATOR) -> Deleted | None:
        """Delete a session, at once but on nodes that are away; None if there is none, RequestError if pinned."""
        record = await asyncio.to_thread(self._owners.of, session_id)
        if not account.may_change(record and record.owner):
            return None
        await asyncio.to_thread(self._pins.check, session_id)  # before any run of it is refused
        lock = self._deleting.setdefault(session_id, asyncio.Lock())
        async with lock:
            await self._flush(session_id, record and record.fence)  # what was stored so far is known, and goes
            holding = {node_of(uri) for uri in await asyncio.to_thread(self._catalogue.files, session_id)}
            found = await asyncio.wrap_future(self._writing().delete(session_id, account))
            nodes = await asyncio.to_thread(self._nodes.all)
            waiting = await asyncio.to_thread(self._nodes.waiting, session_id)
            if waiting:
                await self._flush()
                waiting = await asyncio.to_thread(self._nodes.waiting, session_id)
        away = sorted({nodes[key].name for key in waiting & holding if key in nodes and not nodes[key].lost})
        if away:
            logger.warning("session %s is deleted on %s when they come back", session_id, ", ".join(away))
        return Deleted(tuple(away)) if found or away else None

    async def _flush(self, session_id: str | None = None, fence: str | None = None) -> None:
        """Make all nodes that answer report their runs and do their deletions, as `NodeWriter.flush`."""
        await self._ask_nodes(_FLUSH_S, lambda writer: writer.flush.remote(session_id, fence))

    async def _ask_nodes(self, within_s: float, ask: Callable[[Any], Awaitable[_T]]) -> list[_T | BaseException]:
        """The answers of the nodes' writers, an error for each that does not answer."""
        writers = await asyncio.to_thread(node_writers, self._asked)
        asked = [asyncio.wait_for(awaited(ask(writer)), within_s) for writer in writers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for writer, said in zip(writers, answers, strict=True):
            if isinstance(said, BaseException):
                logger.warning("%s does not answer: %s", writer, said)
        return answers

    async def withdraw(self, session_id: str, run_ids: Sequence[str]) -> bool:
        """As `Writer.withdraw`, on all nodes; false, too, if a node does not answer."""
        here = await super().withdraw(session_id, run_ids)
        there = await self._ask_nodes(_WITHDRAW_S, lambda one: one.withdraw.remote(session_id, run_ids))
        return here and all(said is True for said in there)

    # ---- the catalogue and the archive

    async def restore(self, uris: Sequence[str]) -> bool:
        """Fetch segments to the disk that are in the bucket alone, as `Archive.restore`: for the reader."""
        with explained(self._root):
            return self._archive is not None and await asyncio.to_thread(self._archive.cache.restore, uris)

    async def check_archive(self, archive: str) -> None:
        """Raise StoreError unless the store archives to this bucket, a URI or empty for none."""
        from deployments.activations.files.places import place_of

        bucket = self._archive and self._archive.place
        if (archive and place_of(archive).id) != (bucket.id if bucket else ""):
            raise StoreError(
                f"The activation store of {self._root} runs already and archives to {bucket or 'no bucket'}: "
                "start with the same archive, or stop Ray and start again"
            )

    # ---- other nodes

    async def place(self) -> Home:
        """Where the store is, for the writers of other nodes."""
        return Home(ray.get_runtime_context().get_node_id(), self._mark, self._holds)

    def _look_through(self) -> None:
        try:
            self._catalogue.look()
        except StoreError:  # nobody waits for it; the catalogue looks again by itself
            logger.exception("files of %s were not looked through", self._root)

    async def join(self, node: Node) -> Reply:
        """A node's writer reports its runs from now on; its key is empty if it writes in the store's own directory."""
        if not node.key:  # it may have stored runs before of which it had no time to tell
            if self._look is None or self._look.running() or self._look.done():  # else the next one finds them
                self._look = self._look_pool.submit(self._look_through)
            return Reply(self._node_life(), {}, [], {})
        await asyncio.to_thread(self._nodes.join, node)
        self._watch()
        known = await asyncio.to_thread(self._catalogue.files_of, uri_of(node.key, ""))
        deletions = await asyncio.to_thread(self._nodes.deletions, node.key)
        if self._archive:
            self._archive.retry()
        releases = await asyncio.to_thread(releases_nodes)
        return Reply(self._node_life(), {}, deletions, known, releases)

    async def report(self, key: str, notes: list[FileUpdate], deleted: list[int], asked: list[str]) -> Reply:
        """As `SessionManager.note`; `deleted` are ids of deletions that the node did before it wrote these runs."""
        if deleted:
            await asyncio.to_thread(self._end_deletions, key, deleted)
        refused = await self._ask(lambda manager: manager.note(key, notes, asked))
        waiting = await asyncio.to_thread(self._nodes.deletions, key) if key else []
        return Reply(self._node_life(), refused, waiting)

    def _end_deletions(self, key: str, done: Collection[int]) -> None:
        """A node has deleted sessions: nothing of them is listed that a crash may have left."""
        for deletion in self._nodes.deletions(key):
            if deletion.id in done:
                self._catalogue.forget_files(uri_of(key, f"{deletion.session_id}/"))
        self._nodes.end_deletions(key, done)

    def _node_life(self) -> str:
        """Identifies what the store knows of nodes: if it changes, nodes report everything again."""
        return f"{self._holds} {self._catalogue.remade}"

    def _watch(self) -> None:
        """Look for nodes that come back, from now on."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=_watch, args=(weakref.ref(self),), name="nodes", daemon=True)
            self._watcher.start()

    def open_returned(self) -> None:
        """Open the directories of nodes that have come back; RayError or ValueError if Ray refuses."""
        self._nodes.mark_lost()
        known = self._nodes.all().values()
        there = {node.name for node in known if self._nodes.is_alive(node)}
        if away := {node.name: node.ray_id for node in known if node.name not in there}:
            open_returned(self._asked, find(self._asked), self._archive_uri, away)

    # ---- limits

    async def retain(self, retention: Retention, now: float | None = None, application: str | None = None) -> list[str]:
        """Keep to these limits from now on, also when started again; as `Writer.retain`.

        Limits delete everybody's sessions: so StoreError if another application that runs has set others.
        `application` None sets them in any case.
        """
        from deployments.activations.state.state import save_limits

        if application is not None:
            others = self._limits_of.keys() - {application}
            for name in others - await asyncio.to_thread(_running, frozenset(others)):
                del self._limits_of[name]
            for name, limits in self._limits_of.items():
                if name != application and limits != retention:
                    raise StoreError(
                        f"The activation store at {self._asked} already uses the limits of the application "
                        f"{name!r}, {limits.described()}, but {application!r} has "
                        f"{retention.described()}: give it the same limits or another activations_dir."
                    )
            self._limits_of[application] = retention
        self._limits = retention  # also those of a writer that takes the place of this one
        gone = asyncio.wrap_future(self._writing().retain(retention, now))
        await asyncio.to_thread(save_limits, self._root, self._life, retention, self._limits_of)
        return await gone

    # ---- clients' files and profiles

    async def client_data(self, what: str, method: str, *args: Any) -> Any:
        """Call a method of clients' `tensors`, `readouts` or `profiles`: `client_data("tensors", "read", id)`."""
        call = functools.partial(getattr(self._client_data[what], method), *args)
        pool = self._files_pool if method in ("put", "delete") else None
        return await asyncio.get_running_loop().run_in_executor(pool, call)


def _is_restarted() -> bool:
    """Whether this process is of an actor that came back by itself."""
    context = ray.get_runtime_context() if ray.is_initialized() else None
    return bool(context and context.get_actor_id() and context.was_current_actor_reconstructed)


def _running(applications: Set[str]) -> Set[str]:
    """Those of some applications that Serve runs."""
    if not applications:
        return frozenset()
    from ray import serve

    return applications & serve.status().applications.keys()


def _watch(of: weakref.ref[ActivationStore]) -> None:
    while (store := of()) is not None:
        try:
            if ray.is_initialized():  # else it is no actor
                store.open_returned()
        except Exception:  # nothing is above this thread, and what failed may not fail the next time
            logger.exception("cannot open the directories of returned nodes; retrying")
        del store
        time.sleep(_WATCH_S)


def connect(root: str, archive: str | None = None, archive_cache_bytes: int = 64 << 30) -> Any:
    """A handle to the actor that keeps `root`: one for all applications; the first call starts it.

    It is no Serve deployment: Serve stops all of an application at once, and this has to outlive requests that are
    finished then.
    """
    # Admission is the replicas' business: the store's own limit only stands above it.
    made = detached(ActivationStore, _ACTOR + root, max_concurrency=10_000, resources=ON_HEAD)
    return made.remote(root, uuid.uuid4().hex, archive or "", archive_cache_bytes)


def find(root: str) -> Any:
    """A handle to the actor that keeps `root`; StoreError if there is none."""
    try:
        return ray.get_actor(_ACTOR + root, namespace=NAMESPACE)
    except ValueError as error:
        raise StoreError(f"The activation store at {root} does not run: deploy the server again.") from error


@functools.cache
def code_version() -> str:
    """What tells the code of this package, as it was when it was first asked, from another version's."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


async def check_code(root: str, store: Any) -> None:
    """Warn of a store that runs other code than this process, as after an update; StoreError if it is too old."""
    advice = "restart Ray when no request is recording (stored runs stay)"
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
