"""The activation store as an actor: it writes runs, keeps the index, limits and clients' files, and archives."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from deployments.accounts import OPERATOR, Account
from deployments.activations.facts import SessionName, StoreError
from deployments.activations.limits import Retention, read_limits, write_limits
from deployments.activations.nodes import RunReceiver, awaited, end_process, node_writers, placed_marker, sees
from deployments.clusters import ON_HEAD, STORE, detached

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deployments.activations.facts import FileUpdate

_NODE_S = 10.0  # for which a node's writer is waited for
_START_PAUSE_S = 1.0  # before a store that came back by itself, and could not start, is started again

logger = logging.getLogger(__name__)


class ActivationStore(RunReceiver):
    """Keeps runs in Arrow files below one absolute directory, and archives them to a bucket.

    `archive` is the URI of the bucket, of which at most `archive_cache_bytes` stay on the disk. All methods raise
    StoreError where the disk refuses; the constructor a ValueError if the directory or the bucket cannot be used. A
    store that comes back by itself starts again until it can, and keeps to its last limits.
    """

    def __init__(self, root: str, archive: str = "", archive_cache_bytes: int = 64 << 30) -> None:
        try:
            self._open(root, archive, archive_cache_bytes)
        except Exception:  # whatever it is: an actor whose constructor raises is never restarted, one that dies is
            if not _is_restarted():
                raise
            logger.exception("the activation store of %s starts again", root)
            time.sleep(_START_PAUSE_S)
            os._exit(1)

    def _open(self, root: str, archive: str, archive_cache_bytes: int) -> None:
        if "://" in root:
            raise ValueError(f"The activation store's root {root!r} must be a path; a bucket is named by archive")
        if not Path(root).is_absolute():
            # An actor's working directory may be a copy that Ray throws away.
            raise ValueError(f"The activation store's root {root!r} must be an absolute path")
        # Serve's controller and the ingress import this module too, and need no Arrow.
        from deployments.activations.archive import Uploader, bucket
        from deployments.activations.files.disk import DiskCheck
        from deployments.activations.index.index import Index
        from deployments.activations.writer.recovery import open_directory, recover
        from deployments.activations.writer.writer import Writer
        from deployments.client_data.presets import StoredPresets
        from deployments.client_data.tensors import TensorFiles
        from deployments.client_data.usage import UsageFiles
        from deployments.permissions import restrict
        from deployments.readouts.files import LensFiles, ReadoutFiles

        restrict(Path(root))
        self._asked, self._root, self._archive = root, Path(root).resolve(), archive
        target = bucket(archive) if archive else None
        self._lock = open_directory(self._root)
        recover(self._root, Index.sealed_files(self._root))
        self._index = Index.open(self._root, archive)
        self._limits_of = dict[str, Retention]()  # by application
        self._writer = Writer(self._root, self._index, on_failure=end_process)
        self._writer.retain(read_limits(self._root))
        self._uploader = Uploader(self._root, self._index, target, archive_cache_bytes) if target else None
        self._room = DiskCheck(self._root)
        self._client_data: dict[str, Any] = {"tensors": TensorFiles(self._root), "readouts": ReadoutFiles(self._root)}
        self._client_data["lenses"] = LensFiles(self._root)
        self._client_data |= {"presets": StoredPresets(self._root), "usage": UsageFiles(self._root)}
        self._files_pool = ThreadPoolExecutor(1, thread_name_prefix="small-files")  # one changes them at a time
        self._held, self._marker = contextlib.ExitStack(), ""
        self._apart = set[str]()  # nodes that do not share the directory

    async def check_archive(self, archive: str) -> None:
        """Raise StoreError unless the store archives to this bucket, a URI or empty for none."""
        if archive != self._archive:
            raise StoreError(
                f"The activation store of {self._root} runs already and archives to {self._archive or 'no bucket'}: "
                "start with the same archive, or stop Ray and start again"
            )

    # ---- sessions; an account that may not change one is answered as if there were none

    async def check_room(self, session: SessionName, size: int) -> None:
        """Raise StoreError if a run of `size` bytes cannot be stored now; nothing is kept free for it."""
        if self._writer.has_quotas:
            await asyncio.wrap_future(self._writer.make_room(session, size, check_only=True))
        await self._room.check(size)

    async def pin(self, session_id: str, pinned: bool, account: Account = OPERATOR, owner: str | None = None) -> bool:
        """Pin a session, or take its pin away: true when durable, false if there is none."""
        session = await asyncio.to_thread(self._index.named, session_id, account, owner)
        if session is None:
            return False

        def change() -> bool:
            from deployments.activations.files.disk import set_pin

            if not self._index.files(session):  # it was deleted meanwhile
                return False
            set_pin(self._root, session, pinned)
            self._index.pin(session, pinned)
            return True

        return await asyncio.get_running_loop().run_in_executor(self._files_pool, change)

    async def delete(self, session_id: str, account: Account = OPERATOR, owner: str | None = None) -> bool:
        """Delete a session: its files are gone when this answers. False if there is none, RequestError if pinned."""
        session = await asyncio.to_thread(self._index.named, session_id, account, owner)
        if session is None:
            return False
        if session not in await asyncio.to_thread(self._index.pinned):
            await self._ask_nodes(lambda writer: writer.end_runs.remote(session))
        return await asyncio.wrap_future(self._writer.delete(session))

    async def withdraw(self, session: SessionName, run_ids: Sequence[str]) -> bool:
        """As `Writer.withdraw`, on all nodes; false, too, if a node does not answer."""
        answers = await self._ask_nodes(lambda writer: writer.withdraw.remote(session, run_ids))
        return all(answer is True for answer in answers) and await super().withdraw(session, run_ids)

    async def _ask_nodes(self, ask: Any) -> list[Any]:
        """The answers of the nodes' writers, an error for each that does not answer."""
        writers = await asyncio.to_thread(node_writers, self._asked)
        asked = [asyncio.wait_for(awaited(ask(writer)), _NODE_S) for writer in writers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for writer, answer in zip(writers, answers, strict=True):
            if isinstance(answer, BaseException):
                logger.warning("%s does not answer: %s", writer, answer)
        return answers

    # ---- writers of other nodes

    async def marker(self) -> str:
        """The name of a marker that lies in the directory, for nodes to look for."""
        if not self._marker:
            self._marker = self._held.enter_context(placed_marker(self._root))
        return self._marker

    async def accept(self, address: str, marker: str) -> bool:
        """Whether a node shares the directory: its marker lies here. One that does not is logged once."""
        if await asyncio.to_thread(sees, self._root, marker):
            return True
        if address not in self._apart:
            self._apart.add(address)
            logger.warning("node %s does not share %s: its runs are written through this node", address, self._asked)
        return False

    async def add(self, updates: Sequence[FileUpdate]) -> tuple[bool, list[str]]:
        """List runs that another node's writer made durable.

        Returns whether the store has quotas, and the paths of files that are gone: their session was deleted.
        """

        def add() -> list[str]:
            present = [update for update in updates if (self._root / update.file.path).exists()]
            self._index.add(*present)
            return [update.file.path for update in updates if update not in present]

        return self._writer.has_quotas, await asyncio.to_thread(add)

    async def make_room(self, session: SessionName, size: int) -> bool:
        """Make room for bytes that another node is about to write, as `Writer.make_room`; whether there are quotas."""
        if self._writer.has_quotas:
            await asyncio.wrap_future(self._writer.make_room(session, size))
        return self._writer.has_quotas

    async def look(self) -> None:
        """Scan the files again: a node's writer could not report some."""
        await asyncio.to_thread(self._index.look)

    # ---- limits

    async def retain(
        self, retention: Retention, now: float | None = None, application: str | None = None
    ) -> list[SessionName]:
        """Keep to these limits from now on, also when started again; as `Writer.retain`.

        Limits delete everybody's sessions: so StoreError if another application that runs has set others.
        `application` None sets them in any case.
        """
        if application is not None:
            others = self._limits_of.keys() - {application}
            for name in others - await asyncio.to_thread(_running, frozenset(others)):
                self._limits_of.pop(name, None)
            for name, limits in self._limits_of.items():
                if name != application and limits != retention:
                    raise StoreError(
                        f"The activation store at {self._asked} already uses the limits of the application "
                        f"{name!r}, {limits.described()}, but {application!r} has "
                        f"{retention.described()}: give it the same limits or another activations_dir."
                    )
            self._limits_of[application] = retention
        deleted: asyncio.Future[list[SessionName]] = asyncio.wrap_future(self._writer.retain(retention, now))
        await asyncio.to_thread(write_limits, self._root, retention)
        return await deleted

    # ---- clients' files, presets and usage

    async def client_data(self, what: str, method: str, *args: Any) -> Any:
        """Call a method of one kind of clients' data: `client_data("tensors", "read", id)`."""
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


def connect(root: str, archive: str | None = None, archive_cache_bytes: int = 64 << 30) -> Any:
    """A handle to the actor that keeps `root`: one for all applications; the first call starts it.

    It is no Serve deployment: Serve stops all of an application at once, and this has to outlive requests that are
    finished then.
    """
    # Admission is the replicas' business: the store's own limit only stands above it.
    made = detached(ActivationStore, STORE + root, max_concurrency=10_000, resources=ON_HEAD)
    return made.remote(root, archive or "", archive_cache_bytes)
