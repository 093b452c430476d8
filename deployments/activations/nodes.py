"""The actors that take a replica's runs: a writer on its node if that shares the store's directory, else the store."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray._private import worker as ray_worker  # the only way to find the directory of Ray's session
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.activations.facts import FileUpdate, RunEnd, RunInfo, RunLocation, SessionName, StoreError
from deployments.activations.files.disk import NEW, create, directory, take
from deployments.clusters import HEAD, NAMESPACE, detached, detached_names
from deployments.permissions import restrict

if TYPE_CHECKING:  # Serve's controller and the ingress import this module too, and need no Arrow
    from deployments.activations.writer.writer import Writer

MARKER = f"{NEW}shared-"  # in a store's directory, whose next start removes those that killed processes left
_SEEN_S = 5.0  # for which a file of another node is waited for: NFS keeps listings for some seconds
_READY_S = 60.0  # that a replica waits for its node's writer
_REPORT_S = 60.0  # for which durable runs wait for the store to list them
_PAUSE_S = 0.5  # between two reports that are not answered
_LOOK_S = 10.0  # between two looks whether a replica uses its node's writer
_WRITER = "activation writer of "

logger = logging.getLogger(__name__)


class RunReceiver:
    """The actor that a replica sends its runs to: the store, or the writer of the replica's node.

    A batch comes as it is, if it is small, or as a reference, in a list, so that Ray passes it on unresolved.
    """

    _writer: Writer

    async def ready(self) -> None:
        """Return once it can be used."""

    async def append(self, session: SessionName, run_id: str, part: int, batches: list[Any], most: int = 0) -> None:
        """Take more of a run that is not finished, as `Writer.append`; not durable yet when it answers."""
        fetched = await _fetch(run_id, batches)
        await self._admit(session, run_id, fetched)
        await asyncio.wrap_future(self._writer.append(session, run_id, part, fetched, most))

    async def write(self, run: RunInfo, batches: list[Any], part: int = 0) -> RunLocation:
        """Store a run, or the end of one, as `Writer.submit`; durable when it answers."""
        fetched = await _fetch(run.run_id, batches)
        await self._admit(run.session, run.run_id, fetched)
        return await asyncio.wrap_future(self._writer.submit(run, fetched, part))

    async def write_all(self, ends: list[RunEnd]) -> list[RunLocation | Exception]:
        """As `write`, for several runs: what it returns or raises for each."""
        done = await asyncio.gather(*(self.write(*end) for end in ends), return_exceptions=True)
        return [result if isinstance(result, RunLocation) else _sendable(result) for result in done]

    async def _admit(self, session: SessionName, run_id: str, batches: Sequence[Any]) -> None:
        """Raise StoreError if the session may not get these; parts of the run that are there are dropped."""
        return  # the store's writer checks by itself

    async def abandon(self, session: SessionName, run_id: str) -> None:
        """As `Writer.abandon`."""
        await asyncio.wrap_future(self._writer.abandon(session, run_id))

    async def withdraw(self, session: SessionName, run_ids: Sequence[str]) -> bool:
        """As `Writer.withdraw`."""
        return await asyncio.wrap_future(self._writer.withdraw(session, run_ids))


async def _fetch(run_id: str, batches: Sequence[Any]) -> list[Any]:
    import pyarrow as pa  # only the actor needs it

    try:
        return [batch if isinstance(batch, pa.RecordBatch) else await batch for batch in batches]
    except ray.exceptions.RayError as error:
        raise StoreError(
            f"The activations of run {run_id} were lost before they were stored "
            f"({type(error).__name__}): send the request again."
        ) from error


def _sendable(error: BaseException) -> Exception:
    """An error as it can be returned; its caller knows those of the store and of Ray."""
    if isinstance(error, StoreError | ValueError | ray.exceptions.RayError):
        return error
    return StoreError(f"{type(error).__name__}: {error}")


async def awaited(answer: Awaitable[Any]) -> Any:
    """A reference of Ray's as a coroutine, which asyncio's limits of time take."""
    return await answer


def end_process() -> None:
    """End this actor, whose writer has failed: callers that wait get an error, and Ray starts it again."""
    os._exit(1)


def connect_writer(root: str, store: Any) -> Any:
    """The actor that takes this node's runs.

    The store itself on its own node, and for a node that does not share its directory: batches then go to the store
    through Ray's object store.
    """
    own = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == own)  # type: ignore[no-untyped-call]
    if HEAD in node["Resources"] or not shares(Path(root), store, node["NodeManagerAddress"]):
        return store
    use = _uses(root)  # stays open, so that the lock holds until this process ends, however it does
    fcntl.flock(use, fcntl.LOCK_SH)  # after the end of a writer that ends now
    on_it = NodeAffinitySchedulingStrategy(own, soft=False)
    made = detached(NodeWriter, f"{_WRITER}{root} on {own}", max_concurrency=10_000, scheduling_strategy=on_it)
    writer = made.remote(root, store)
    try:
        ray.get(writer.ready.remote(), timeout=_READY_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        logger.warning("the writer of this node does not start (%s): its runs go through the head", error)
        os.close(use)
        return store
    return writer


def _uses(root: str) -> int:
    """A descriptor of the file that the replicas of this node lock together while they use the writer of a store."""
    folder: str = ray_worker.global_worker.node.get_session_dir_path()  # type: ignore[union-attr]
    of = f"{ray.get_runtime_context().get_node_id()} {root}"
    path = Path(folder) / f"uses-{hashlib.sha256(of.encode()).hexdigest()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def shares(root: Path, store: Any, address: str) -> bool:
    """Whether this node shares the store's directory: each reads a marker of the other, and locks hold on both."""
    theirs: str = ray.get(store.marker.remote())
    if sees(root, theirs) and _is_locked(root / f"{MARKER}{theirs}"):
        try:
            with placed_marker(root) as mine:
                return bool(ray.get(store.accept.remote(address, mine)))
        except OSError as error:
            logger.warning("this node cannot write to %s: %s", root, error)
    ray.get(store.accept.remote(address, ""))
    return False


@contextlib.contextmanager
def placed_marker(root: Path) -> Iterator[str]:
    """While open, a marker lies in a directory, locked; gives its random name. OSError if it cannot be written."""
    name = secrets.token_hex(16)
    with directory(root.resolve()) as folder:
        file = create(f"{MARKER}{name}", folder)
    try:
        os.write(file, name.encode())
        os.fsync(file)
        yield name
    finally:
        os.close(file)
        (root / f"{MARKER}{name}").unlink(missing_ok=True)


def sees(root: Path, name: str) -> bool:
    """Whether a marker of another node lies in a directory, perhaps after a moment."""
    until = time.monotonic() + _SEEN_S
    while name and root.is_dir():
        with contextlib.suppress(OSError):
            os.listdir(root)  # NFS then asks the server again
            if (root / f"{MARKER}{name}").read_text() == name:
                return True
        if time.monotonic() >= until:
            break
        time.sleep(0.1)
    return False


def _is_locked(path: Path) -> bool:
    """Whether another node's lock holds here: else the store would take files that are being written for leftovers."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        logger.warning("locks on %s fail: %s", path.parent, error)
        return False
    logger.warning("locks on %s hold on each node alone: mount it with locks that hold on all nodes", path.parent)
    return False


def node_writers(root: str) -> list[Any]:
    """The handles of the nodes' writers of a store; none where this process has joined no cluster."""
    writers, prefix = [], f"{_WRITER}{root} on "
    for node in detached_names(prefix) if ray.is_initialized() else []:
        with contextlib.suppress(ValueError):  # it has ended meanwhile, and its node with it
            writers.append(ray.get_actor(prefix + node, namespace=NAMESPACE))
    return writers


class NodeWriter(RunReceiver):
    """Writes the runs of one node's replicas, and tells the store of each before it is answered.

    It ends when no replica uses it any more, because Ray's autoscaler keeps a node with an actor.

    Args:
        root: The store's directory.
        store: The store's actor, which keeps the index and the limits.
    """

    def __init__(self, root: str, store: Any) -> None:
        from deployments.activations.writer.writer import Writer  # needs Arrow, which Serve's controller does not

        self._root, self._store = Path(root).resolve(), store
        restrict(self._root)
        self._writer = Writer(self._root, None, report=self._report, on_failure=end_process)
        self._limited = True  # whether the store has quotas, as far as is known
        self._missed = False  # whether the store may not know all runs
        threading.Thread(target=self._end_unused, args=(_uses(root),), name="unused", daemon=True).start()

    def _end_unused(self, use: int) -> None:
        """Wait until no replica uses this actor, finish what is left, and end it for good."""
        while not take(use):
            time.sleep(_LOOK_S)
        # A replica that comes now waits for the lock, which ends with this process, and starts another writer.
        try:
            self._writer.close()
            if self._missed:
                self._report([])
            ray.kill(ray.get_runtime_context().current_actor)
        finally:  # after an error, such as of a head that is away, Ray starts it again, and it ends then
            end_process()

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
