"""The writer of a node other than the store's. Runs stay on the disk of the node that computes them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import ray

from deployments.activations.archive.archive import upload_sealed
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.database import can_hold
from deployments.activations.facts import FileUpdate, StoreError, explained, name_of
from deployments.activations.files.disk import write
from deployments.activations.files.machines import Heartbeat, local_locks
from deployments.activations.files.places import place_of
from deployments.activations.nodes.cluster import is_released
from deployments.activations.nodes.files import serve_segments
from deployments.activations.nodes.receiving import Home, RunReceiver, StartingError, awaited
from deployments.activations.nodes.reporting import RunReporter
from deployments.activations.state.nodes import Deletion, Node, uri_of
from deployments.activations.writer.recovery import MARK, open_directory
from deployments.activations.writer.room import DiskCheck
from deployments.activations.writer.writer import Writer
from deployments.permissions import restrict

_OWN = ".node"  # in a directory that a node keeps for itself; no session id begins with '.'
_ASK_S = 10.0  # that a run waits for a store that starts
_JOIN_S = 10.0  # that the first runs wait until the node has the store's list of deletions
_FENCES = 10_000  # of deleted sessions, which are remembered

logger = logging.getLogger(__name__)


class NodeWriter(RunReceiver):
    """Writes the runs of one node's replicas on that node, and reports them to the store.

    If the node sees the store's directory, it writes its own files there and drops from its catalogue what the store
    lists. Otherwise it keeps a directory of the same path, with its own catalogue.

    Args:
        root: The store's directory, on the store's node.
        store: The store's actor.
        archive: The URI of the bucket, or None.
        ray_id: The node's id in Ray.
        address: The node's IP address, which names it in listings.
    """

    def __init__(self, root: str, store: Any, archive: str | None, ray_id: str, address: str) -> None:
        self._store, self._archive, self._ray_id, self._address = store, archive, ray_id, address
        self._asked, self._root = root, Path(root).resolve()
        self._flushes = ThreadPoolExecutor(1, thread_name_prefix="node-flush")  # waits for no upload
        self._fences = OrderedDict[str, None]()  # of deleted sessions, the oldest first
        self._opening = asyncio.Lock()
        self._opened = False
        self._heartbeat: Heartbeat | None = None  # in a directory of the node's own
        restrict(self._root)
        if (self._root / _OWN).exists():  # the store may be away
            try:
                self._open_own()
            except StoreError:
                logger.exception("%s is opened with the next run", self._root)

    async def ready(self) -> None:
        """Return once the node can write runs. StoreError if it cannot; the message says what to change."""
        async with self._opening:
            if not self._opened:
                await self._open_found()
        await self._reporter.joined(_JOIN_S)
        if self._reporter.releases and self._node.key and not self._archive:
            raise StoreError(
                f"Ray's autoscaler can release this node, and with it the runs in {self._root}: set archive to a "
                "bucket (archive=s3://bucket/prefix), or activations_dir to a directory that all nodes share."
            )

    async def check_room(self, session_id: str, size: int) -> None:
        """As `ActivationStore.check_room`, by the quotas in the store's last reply."""
        await self._check(session_id, None)
        await self._room.check(size)

    async def flush(self, session_id: str | None = None, fence: str | None = None) -> None:
        """Report all runs to the store and do its deletions; open runs of `session_id` with this `fence` end."""
        self._bar(fence)
        if self._opened:
            if session_id and not self._node.key:
                await asyncio.wrap_future(self._writing().end_runs(session_id))
            await asyncio.get_running_loop().run_in_executor(self._flushes, self._reporter.flush)

    async def upload(self, name: str, size: int) -> None:
        """As `upload_sealed`, of a segment by its name `<session>/<segment>`, quoted as in URIs."""
        assert self._archive is not None
        file = place_of(self._archive).file(unquote(name))
        await asyncio.to_thread(upload_sealed, self._path(name), size, file)

    async def remove(self, name: str) -> None:
        """Remove a segment that is in the bucket, by its name; raises OSError where the disk refuses."""
        path = self._path(name)
        await asyncio.to_thread(path.unlink, missing_ok=True)
        await asyncio.to_thread(self._catalogue.forget_files, path.as_uri())

    def close(self) -> None:
        """End. What was not reported is reported when the writer starts again."""
        if self._opened:
            self._reporter.close()
            self._writer.close()
            self._catalogue.close()
        if self._heartbeat:
            self._heartbeat.close()

    # ---- opening

    async def _open_found(self) -> None:
        """Open the store's directory where the node sees it, else its own."""
        if not (self._root / _OWN).exists():
            home = await self._home()
            with contextlib.suppress(OSError):
                if (self._root / MARK).read_text() == home.mark:
                    await self._check_locks(home)
                    self._open("", Catalogue())
                    return
        await asyncio.to_thread(self._open_own)

    async def _home(self) -> Home:
        try:
            answer: Home = await asyncio.wait_for(awaited(self._store.place.remote()), _ASK_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            reason = str(error) or f"no answer in {_ASK_S:g} s"
            raise StartingError(f"The activation store has not started ({reason}): send the request again.") from error
        return answer

    async def _check_locks(self, home: Home) -> None:
        """Raise StoreError if this node can take the lock that the store holds: locks hold on each node alone."""
        with explained(self._root):
            taken = can_hold(self._root)
        if taken and await self._home() == home:
            raise local_locks(self._root, "the store's node")

    def _open_own(self) -> None:
        """Open a directory of the node's own, as the store opens its."""
        with explained(self._root):
            key, self._heartbeat = open_directory(self._root)
            write(self._root, ".", _OWN, b"A node of a cluster keeps this directory for itself.\n")
        catalogue = Catalogue.rebuild(self._root)
        self._serve()  # before the node joins the store
        self._open(key, catalogue)

    def _serve(self) -> None:
        serve_segments(self._asked, self._ray_id)

    def _open(self, key: str, catalogue: Catalogue) -> None:
        self._node = Node(key, self._address, str(self._root), self._ray_id)
        self._node_name = self._address if key else None
        self._catalogue = catalogue
        self._begin_writer = functools.partial(Writer, self._root, catalogue)
        self._writer = self._begin_writer()
        self._room = DiskCheck(self._root)
        self._reporter = RunReporter(
            self._store, self._node, self._stored, self._delete, self._forget_reported, self._beat
        )
        catalogue.on_added = lambda added: self._reporter.add(self._notes(added))
        self._opened = True

    # ---- for the reporter's thread

    def _beat(self) -> None:
        """End all files that no run is being written to where the node is about to go, so that they are uploaded."""
        if self._archive and is_released():
            self._writing().seal(None).result()

    def _stored(self, known: Mapping[str, tuple[int, int]]) -> Iterator[FileUpdate]:
        """The node's files and runs, but for the files that the store knows as they are."""
        counts = self._catalogue.files_of("file:")
        for session_id, file in self._catalogue.all_files():
            name = name_of(file.uri)
            if known.get(name) != counts.get(name) and (runs := self._catalogue.of_file(file.uri)):
                yield from self._notes([FileUpdate(session_id, runs, file)])

    def _forget_reported(self, notes: Sequence[FileUpdate]) -> None:
        for file in (note.file for note in notes if note.file.sealed and not self._node.key):
            self._catalogue.forget_files(self._path(file.uri).as_uri())

    def _delete(self, deletion: Deletion) -> bool:
        """Delete a session of the node's own directory, as `Deletion` says; whether it did."""
        self._bar(deletion.fence)
        catalogue, session_id, last = self._catalogue, deletion.session_id, deletion.last
        if last is None:
            self._writing().delete(session_id).result()
            return True

        def goes_on(busy: Set[str]) -> bool:
            return session_id in busy or (catalogue.last_run(session_id) or last) > last

        self._writing().delete(session_id, unless=goes_on).result()
        return not catalogue.knows(session_id)

    def _notes(self, added: Iterable[FileUpdate]) -> list[FileUpdate]:
        return [note._replace(file=note.file._replace(uri=self._reported_uri(note.file.uri))) for note in added]

    def _reported_uri(self, uri: str) -> str:
        """A segment's URI for the store, which may have another path to a directory that it shares with the node."""
        return uri_of(self._node.key, name_of(uri))

    def _path(self, uri: str) -> Path:
        """A segment's path on this node, by its URI or name."""
        return self._root / unquote(name_of(uri))

    async def _check(self, session_id: str, fence: str | None) -> None:
        """Raise StoreError where no run of a session may be written."""
        await self.ready()
        if fence in self._fences:
            raise StoreError(f"Session {session_id} was deleted while the run went on: send the request again.")
        if reason := self._reporter.refused.get(session_id):
            raise StoreError(reason)

    async def _admit(self, session_id: str, run_id: str, fence: str | None) -> None:
        """As `RunReceiver._admit`; an open run that is refused is dropped."""
        try:
            await self._check(session_id, fence)
        except StoreError:
            await self.abandon(session_id, run_id)
            raise

    def _bar(self, fence: str | None) -> None:
        if fence is not None:
            self._fences[fence] = None
            while len(self._fences) > _FENCES:
                self._fences.popitem(last=False)
