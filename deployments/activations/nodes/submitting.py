"""Sending runs to a writer over Ray: by reference, in parts, on the node of the replica unless that may be removed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import ray
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.activations.facts import RunFacts, StoredRun, StoreError
from deployments.clusters import HEAD, NAMESPACE, detached

if TYPE_CHECKING:  # Serve's controller and the ingress import this module too, and need no Arrow
    from deployments.activations.writer.writer import Writer

    Ref = ray.ObjectRef[Any]

_READY_S = 60.0  # that a replica waits for its node's writer

_MONITORS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
_STATUS = b"__autoscaling_status"  # ray._private.ray_constants.DEBUG_AUTOSCALING_STATUS

logger = logging.getLogger(__name__)


class StartingError(StoreError):
    """The store has not started yet."""


class RunReceiver(ABC):
    """The actor that a replica sends its runs to: the store on its own node, else the node's writer.

    Batches come as references in a list, so that Ray passes them on unresolved.
    """

    _begin_writer: Callable[[], Writer]
    _writer: Writer
    _node_name: str | None = None  # of the node on whose own disk the runs are
    _opened = True  # whether there is a writer

    def _writing(self) -> Writer:
        """The writer. One that ended by an error is replaced; its callers have got the error."""
        if not self._writer.alive:
            self._writer = self._begin_writer()
        return self._writer

    async def append(
        self, session_id: str, run_id: str, part: int, batches: list[Ref], most: int = 0, fence: str | None = None
    ) -> None:
        """Take more of a run that is not finished, as `Writer.append`; not durable yet when it answers."""
        await self._admit(session_id, run_id, fence)
        found = await _fetch(run_id, batches)
        await asyncio.wrap_future(self._writing().append(session_id, run_id, part, found, most, fence))

    async def write(
        self, run: RunFacts, batches: list[Ref], part: int = 0, fence: str | None = None, archived: bool = False
    ) -> StoredRun:
        """Store a run, or the end of one, as `Writer.submit`; durable when it answers, and if asked, `archived`."""
        await self._admit(run.session_id, run.run_id, fence)
        found = await _fetch(run.run_id, batches)
        stored = await asyncio.wrap_future(self._writing().submit(run, found, part, fence))
        if archived:
            await asyncio.wrap_future(self._writing().seal(stored.session_id))
            await self.wait_archived(next(iter(stored.points.values())).uri)
        return stored._replace(node=self._node_name)

    async def _admit(self, session_id: str, run_id: str, fence: str | None) -> None:
        """Raise StoreError if the session may get no run here; parts of the run that are there are dropped."""
        return  # the store has checks of its own

    @abstractmethod
    async def wait_archived(self, uri: str) -> None:
        """Return once a segment is in the bucket, as `ActivationStore.wait_archived`."""

    async def abandon(self, session_id: str, run_id: str) -> None:
        """As `Writer.abandon`."""
        if self._opened:
            await asyncio.wrap_future(self._writing().abandon(session_id, run_id))

    async def renew(self, session_id: str, run_id: str) -> None:
        """As `Writer.renew`."""
        if self._opened:
            await asyncio.wrap_future(self._writing().renew(session_id, run_id))


class Home(NamedTuple):
    """Where the store is: its node's id in Ray, its directory's `mark`, and its `hold` of the directory's lock."""

    node: str
    mark: str
    hold: str


def connect_writer(root: str, store: Any, archive: str | None = None) -> Any:
    """Who takes this node's runs: the store on its own node, elsewhere a writer of the node.

    While the store does not answer, each run fails with the reason. StoreError if the node cannot keep runs.
    """
    own = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == own)  # type: ignore[no-untyped-call]
    if HEAD in node["Resources"]:  # where the store is
        return store
    writer = _open_writer(root, store, archive, own, node["NodeManagerAddress"])
    try:
        ray.get(writer.ready.remote(), timeout=_READY_S)
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, StartingError):
            raise error.cause from error
        logger.warning("runs of this node fail for now: %s", error.cause)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        logger.warning("runs of this node fail until its writer answers: %s", error)
    return writer


def open_returned(root: str, store: Any, archive: str | None, away: Mapping[str, str]) -> None:
    """Open the directories of nodes that have come back, given the ids in Ray that they had by their addresses."""
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        address, own = node["NodeManagerAddress"], node["NodeID"]
        if node["Alive"] and address in away and away[address] != own:
            _open_writer(root, store, archive, own, address)


def _open_writer(root: str, store: Any, archive: str | None, node: str, address: str) -> Any:
    from deployments.activations.nodes.writer import NodeWriter

    on_it = NodeAffinitySchedulingStrategy(node, soft=False)
    writer = detached(NodeWriter, f"{_named(root)} {node}", max_concurrency=10_000, scheduling_strategy=on_it)
    return writer.remote(root, store, archive, node, address)


def writer_on(root: str, node: str) -> Any:
    """The handle of the writer of a node, by its id in Ray; ValueError if there is none."""
    return ray.get_actor(f"{_named(root)} {node}", namespace=NAMESPACE)


def actors(prefix: str) -> list[str]:
    """The names of the cluster's actors that begin so."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in found if one["namespace"] == NAMESPACE and one["name"].startswith(prefix)]


def node_writers(root: str) -> list[Any]:
    """The handles of all nodes' writers of a store."""
    found = []
    for name in actors(_named(root)):
        with contextlib.suppress(ValueError):  # it has ended meanwhile, and its node with it
            found.append(ray.get_actor(name, namespace=NAMESPACE))
    return found


def _named(root: str) -> str:
    return f"activation writer of {root} on"


async def _fetch(run_id: str, batches: Sequence[Ref]) -> list[Any]:
    try:
        return await asyncio.gather(*batches)
    except ray.exceptions.RayError as error:
        raise StoreError(
            f"The activations of run {run_id} were lost before they were stored "
            f"({type(error).__name__}): send the request again."
        ) from error


async def awaited(answer: Awaitable[Any]) -> Any:
    """A reference of Ray's as a coroutine, which asyncio's limits of time take."""
    return await answer


def releases_nodes() -> bool:
    """Whether Ray's autoscaler can release nodes of this cluster; for a process on the head node.

    Ray's monitor runs on each head node, and scales only if it has a configuration. On Kubernetes it shows by its
    status.
    """
    monitors = list[list[str]]()
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue  # it has ended, or is another user's
        if any(word.endswith(_MONITORS) for word in command):
            monitors.append(command)
    if monitors:
        return any(word.startswith("--autoscaling-config") for command in monitors for word in command)
    return bool(_internal_kv_get(_STATUS))


def is_released() -> bool:
    """Whether this node is about to be released."""
    return ray.get_runtime_context().get_node_id() in ray._private.state.state.get_draining_nodes()
