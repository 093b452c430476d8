"""Append runs to shards: one thread, group commit, and no answer before the bytes are on disk.

<root>/<session_id>/<writer>-000001.arrow
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from deployments.activations.accounts import OPERATOR, Account
from deployments.activations.catalogue.entries import Known
from deployments.activations.facts import Note, RunFacts, RunName, StoredRun, StoreError
from deployments.activations.failures import explain
from deployments.activations.limits import Held, Retention
from deployments.activations.segments.checksums import described
from deployments.activations.segments.schema import batch_metadata
from deployments.activations.state.owners import Owners
from deployments.activations.writer.group_commit import Commits
from deployments.activations.writer.open_runs import Chunk, OpenRuns
from deployments.activations.writer.pool import Pool
from deployments.activations.writer.requests import Abandon, Append, Task, Write, check_batches, check_name
from deployments.activations.writer.retention import Keeper
from deployments.errors import RequestError

if TYPE_CHECKING:
    from deployments.activations.archive.archive import Archive
    from deployments.activations.state.nodes import Nodes

logger = logging.getLogger(__name__)

_GATHER_S = 0.02  # for which a commit waits for what still comes, as long as anything does
_HOLD_S = 120.0  # for which a session that is being deleted is held
_CLOSED = "The activation store is shutting down: send the request again"
_LOOK_S = 60.0  # between two looks for sessions that are too old
_SYNC_BYTES = 64 << 20  # an open run's bytes are fsynced in pieces of this size, so that no commit waits for gigabytes


class _Synced:
    """Some file is durable, or cannot be made so, or is closed."""


_Item = Append | Write | Abandon | Task | _Synced


class Writer:
    """Writes and deletes under one root, on a thread of its own; the catalogue follows.

    All that waits when the thread comes round is appended. While one group of runs is made durable, each of its
    files by one fsync, the next is written. Then the futures of the group are answered.

    Args:
        root: An existing directory, absolute and no link.
        catalogue: Told of each run once it is on disk.
        shard_bytes: A shard of at least this length is sealed; one run is never split.
        open_shards: How many shards stay open; the one idle the longest is sealed first.
        idle_s: Seconds without a run after which a shard is sealed.
        lease_s: Seconds without a chunk after which a run that is not finished is abandoned.
        owners: Whose sessions are, where this is the store's writer.
        archive: Where it deletes from as well.
        nodes: Those that delete as well.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Known,
        *,
        shard_bytes: int = 1 << 30,
        open_shards: int = 64,
        idle_s: float = 30,
        lease_s: float = 900,
        owners: Owners | None = None,
        archive: Archive | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        self._root = root
        self._catalogue = catalogue
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        limits = {"shard_bytes": shard_bytes, "open_shards": open_shards}
        self._pool = Pool(root, catalogue, **limits, idle_s=idle_s, wake=self._wake)
        self._keeper = Keeper(root, catalogue, self._pool, owners, archive, nodes)
        self._runs = OpenRuns(root, catalogue, self._pool, self._keeper, lease_s)
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="activation-expiry")
        self._look = math.inf  # when to look for sessions that are too old, in the monotonic clock's seconds
        self._held: dict[str, float] = {}  # sessions that are being deleted, and until when at most
        self._asked: list[Future[Any]] = []  # and perhaps not answered
        self._closing = threading.Lock()
        self._closed = False
        self._failed = False
        self._commits = Commits(root, catalogue, self._runs, self._wake)
        self._thread = threading.Thread(target=self._loop, name="activation-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs and has not failed."""
        return self._thread.is_alive() and not self._failed

    def append(
        self,
        session_id: str,
        run_id: str,
        part: int,
        batches: Sequence[pa.RecordBatch],
        most: int = 0,
        fence: str | None = None,
    ) -> Future[None]:
        """Queue a chunk of a run that is not finished; answered when it is in the file, if not yet durable.

        Args:
            session_id: The session that the run belongs to.
            run_id: Unique within the session.
            part: How many chunks of the run came before. Each is sent when the one before is answered.
            batches: The run's next rows, of one schema.
            most: The most bytes that the whole run may have, where that is known: nothing is deleted for a run that
                would not fit even so.
            fence: What the run's request was told of its session, as `Owners.check` takes it.

        Raises:
            StoreError: At once if the batches are not this session's or the writer is closed; from the
                future if chunks before it are missing or the disk refused. The run cannot be finished then.
        """
        name = RunName(session_id, run_id)
        if not batches:
            raise StoreError(f"Part {part} of run {run_id} has no rows: send it when there are some")
        check_batches(name, batches)
        future: Future[None] = Future()
        self._put(Append(Chunk(name, part, list(batches), None, _sums(batches), most, fence), future))
        return future

    def submit(
        self, run: RunFacts, batches: Sequence[pa.RecordBatch], part: int = 0, fence: str | None = None
    ) -> Future[StoredRun]:
        """Queue a whole run, or the end of one; answered when all of it is on disk.

        Args:
            run: What the run is.
            batches: Its rows behind those appended before; may be empty only where there are some.
            part: How many chunks were appended before.
            fence: As for `append`.

        Raises:
            StoreError: As for `append`.
        """
        name = RunName(run.session_id, run.run_id)
        if not batches and not part:
            raise StoreError(f"Run {run.run_id} has no rows: capture at least one token")
        check_batches(name, batches, run.model)
        batch_metadata(run.run_id, 0, 1, run)  # what JSON cannot hold is the caller's to hear of
        future: Future[StoredRun] = Future()
        self._put(Write(Chunk(name, part, list(batches), run, _sums(batches), fence=fence), future))
        return future

    def abandon(self, session_id: str, run_id: str) -> Future[None]:
        """Queue the end of a run that will not be finished; answered when nothing of it is left.

        What comes of the run later is refused. A run that is stored, or not known, is no error.

        Raises:
            StoreError: At once if the writer is closed.
        """
        future: Future[None] = Future()
        self._put(Abandon(RunName(session_id, run_id), future))
        return future

    def renew(self, session_id: str, run_id: str) -> Future[None]:
        """Queue: a run that is not finished goes on, though nothing of it may come for longer than the lease.

        Raises:
            StoreError: At once if the writer is closed.
        """
        name = RunName(session_id, run_id)
        return self._behind(lambda: self._runs.renew(name), at_once=True)

    def delete(
        self, session_id: str, account: Account = OPERATOR, unless: Callable[[Set[str]], bool] | None = None
    ) -> Future[bool]:
        """Queue a deletion: true when the session's files are gone, false if the account may change none of the name.

        Args:
            session_id: The session.
            account: Who asks.
            unless: Whether it stays after all, asked behind all that is queued, by the sessions that are written to.

        Raises:
            StoreError: At once if `session_id` can name none or the writer is closed; from the future if
                the disk refused.
            RequestError: From the future if the session is pinned.
        """
        check_name(session_id)
        if unless is None:
            return self._behind(lambda: self._delete(session_id, account), at_once=True)
        stays = unless
        return self._behind(lambda: False if stays(self._runs.busy()) else self._delete(session_id, account))

    def bytes_of(self, session_id: str, run_id: str) -> int:
        """Bytes of the batches that are written of a run that is not finished."""
        return self._runs.bytes_of(RunName(session_id, run_id))

    def pin(self, session_id: str, pinned: bool, account: Account = OPERATOR) -> Future[bool]:
        """Queue a session's pin, or its end: true when it is durable, false if the account may change none of the name.

        Raises:
            StoreError: As for `delete`.
        """
        check_name(session_id)
        return self._behind(lambda: self._keeper.pin(session_id, pinned, account))

    def share(self, session_id: str, shared: bool, account: Account) -> Future[bool]:
        """Queue: let everybody read a session, or no more; answered as `pin`.

        Raises:
            StoreError: As for `delete`.
        """
        check_name(session_id)
        return self._behind(lambda: self._keeper.share(session_id, shared, account))

    def assign(self, session_id: str, account: Account) -> Future[str]:
        """Queue: admit a request that records into a session, as `Owners.claim`.

        Raises:
            StoreError: As for `delete`; from the future if the owner has too many sessions.
            RequestError: From the future if the session is another's.
        """
        check_name(session_id)
        return self._behind(lambda: self._keeper.assign(session_id, account, self._runs.busy), at_once=True)

    def retain(self, retention: Retention, now: float | None = None) -> Future[list[str]]:
        """Queue other limits; answered with the sessions that were too old by them, once these are deleted.

        From then on it is looked for such sessions each minute.

        Args:
            retention: The limits.
            now: Unix seconds, of which age is told; by default those of the clock.

        Raises:
            StoreError: At once if the writer is closed.
        """
        return self._behind(lambda: self._retain(retention, time.time() if now is None else now), at_once=True)

    def hold(self, session_id: str) -> Future[None]:
        """Queue: let go of a session's files, and refuse its runs until `release`, or for two minutes.

        Raises:
            StoreError: At once if the writer is closed.
        """
        return self._behind(lambda: self._hold(session_id, _HOLD_S))

    def release(self, session_id: str) -> Future[None]:
        """Queue: take runs of the session again.

        Raises:
            StoreError: At once if the writer is closed.
        """
        return self._behind(lambda: self._hold(session_id, 0.0))

    def note(self, key: str, notes: Sequence[Note], asked: Collection[str] = ()) -> Future[dict[str, str]]:
        """Queue: other nodes' writers have made runs durable; they are listed and counted, as by `Keeper.note`.

        Raises:
            StoreError: At once if the writer is closed.
        """
        return self._behind(lambda: self._keeper.note(key, notes, asked, self._runs.busy), at_once=True)

    def seal(self, session_id: str | None) -> Future[None]:
        """Queue: end a session's files, or all, that no run is being written to, so that they can be archived.

        Raises:
            StoreError: At once if the writer is closed.
        """
        return self._behind(lambda: self._pool.close(session_id))

    def check_quotas(self, session_id: str, size: int) -> Future[list[Held]]:
        """Find out whether a run of a session would be within the quotas, behind what is queued.

        Args:
            session_id: The session.
            size: The most bytes that the run may have.

        Returns:
            From the future, the sessions that would be deleted for it.

        Raises:
            StoreError: At once if the writer is closed; from the future if it would not.
        """
        if not self._keeper.retention.has_quotas:
            future: Future[list[Held]] = Future()
            future.set_result([])
            return future
        return self._behind(lambda: self._keeper.check(session_id, size, self._runs.busy()), at_once=True)

    def close(self) -> None:
        """Finish what is queued, abandon open runs, seal all files, end the thread. May be called twice."""
        with self._closing:
            if not self._closed:
                self._queue.put(None)
            self._closed = True
        self._thread.join()
        self._looks.shutdown()
        self._keeper.close()
        self._commits.close()

    def _behind(self, work: Callable[[], Any], at_once: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        self._put(Task(work, future, at_once))
        return future

    def _wake(self) -> None:
        self._queue.put(_Synced())

    def _put(self, item: _Item) -> None:
        with self._closing:  # nothing is queued behind the end
            if self._closed:
                raise StoreError(_CLOSED)
            self._queue.put(item)

    def _loop(self) -> None:
        try:
            while self._round():
                pass
            self._runs.abandon_all()
            self._pool.end()
        except Exception:
            logger.exception("the writer of %s has ended", self._root)
            self._fail_all()

    def _fail_all(self) -> None:
        """Tell all who wait, and let nobody wait any more."""
        with self._closing:
            self._closed = True
        while not self._queue.empty():
            self._noted(self._queue.get())
        self._commits.close()
        with contextlib.suppress(Exception):  # what it was at may be what is broken
            self._runs.abandon_all()
            self._pool.end()
        self._failed = True  # who is told may ask another writer at once
        for future in self._asked:
            if not future.done():
                future.set_exception(
                    StoreError("The activation store failed, its log says why: send the request again")
                )

    def _round(self) -> bool:
        """Serve all that waits; false once the end was among it. Keeps no batch alive once it is written."""
        items = self._waiting()
        last, until = None in items, time.monotonic() + _GATHER_S
        ended, abandoned = list[Task](), list[Future[None]]()
        drains = False
        while items:
            item = items.popleft()
            if not items and time.monotonic() < until:  # what came while this was written shares its commit
                items = self._queued()
                last = last or None in items
            if item is None or isinstance(item, _Synced) or not item.future.set_running_or_notify_cancel():
                continue
            if isinstance(item, (Append, Write)):
                self._write(item)
                continue
            if isinstance(item, Task) and item.at_once:
                self._do(item)
                continue
            if isinstance(item, Task):
                ended.append(item)
                continue
            reason = f"Run {item.name.run_id} was abandoned: send the request again."
            shard = self._runs.abandon(item.name, reason)
            abandoned.append(item.future)
            # A file that no run is in goes once it is closed, which is when nothing of it is being synced.
            drains = drains or bool(shard and not shard.rows and shard in self._commits.shards)
        if self._commits.ready:
            self._commits.end()
        self._commits.begin()
        if ended or drains or last:
            self._commits.drain()
        self._runs.settle(self._commits.shards)
        self._pool.settle(self._commits.shards)
        for future in abandoned:
            future.set_result(None)
        for task in ended:
            self._do(task)
        if time.monotonic() >= self._look:
            self._look = time.monotonic() + _LOOK_S
            self._expire(time.time()).add_done_callback(self._log)
        return not last

    def _waiting(self) -> deque[_Item | None]:
        """All that waits, or nothing once something is due."""
        self._asked = [future for future in self._asked if not future.done()]
        due = min(self._pool.due, self._runs.due, self._look)
        forever = self._commits.under_way or due == math.inf  # the end of what is under way comes by the queue as well
        try:
            first = self._queue.get(timeout=None if forever else max(0.0, due - time.monotonic()))
        except Empty:
            return deque()
        return deque([self._noted(first), *self._queued()])

    def _queued(self) -> deque[_Item | None]:
        items = deque[_Item | None]()
        while not self._queue.empty():  # this thread alone takes from it
            items.append(self._noted(self._queue.get()))
        return items

    def _noted(self, item: _Item | None) -> _Item | None:
        """An item of which somebody must hear, whatever happens."""
        if item and not isinstance(item, _Synced):
            self._asked.append(item.future)
        return item

    def _hold(self, session_id: str, seconds: float) -> None:
        now = time.monotonic()
        self._held = {name: until for name, until in self._held.items() if until > now and name != session_id}
        if seconds:
            self._held[session_id] = now + seconds
            self._runs.abandon_session(session_id, f"Session {session_id} was deleted while the run went on.")
            self._pool.close(session_id)

    def _write(self, item: Append | Write) -> None:
        try:
            if self._held.get(item.chunk.name.session_id, 0.0) > time.monotonic():
                raise StoreError(f"Session {item.chunk.name.session_id} is being deleted: send the request again.")
            shard, entry = self._runs.write(item.chunk)
        except StoreError as error:
            item.future.set_exception(error)
            return
        finally:
            item.chunk.batches.clear()
        if isinstance(item, Append):
            item.future.set_result(None)
            if shard.unsynced >= _SYNC_BYTES:
                self._commits.touch(shard)
        elif entry:
            self._commits.add(shard, entry, item.future)

    def _do(self, task: Task) -> None:
        try:
            result = task.work()
        except OSError as error:
            task.future.set_exception(explain(self._root, error))
        except (StoreError, RequestError) as error:
            task.future.set_exception(error)
        else:
            if isinstance(result, Future):
                result.add_done_callback(lambda done: self._pass_on(done, task.future))
            else:
                task.future.set_result(result)

    def _pass_on(self, done: Future[Any], to: Future[Any]) -> None:
        """Answer with what was done in the background, unless the writer has failed meanwhile."""
        if to.done():
            return
        if (error := done.exception()) is None:
            to.set_result(done.result())
        else:
            to.set_exception(explain(self._root, error) if isinstance(error, OSError) else error)

    def _delete(self, session_id: str, account: Account) -> bool | Future[bool]:
        if not self._keeper.may_delete(session_id, account):
            return False
        if any(shard.session_id == session_id for shard in self._commits.shards):
            self._commits.drain()
        self._runs.abandon_session(session_id, f"Session {session_id} was deleted while the run went on.")
        return self._keeper.delete(session_id)

    def _expire(self, now: float) -> Future[list[str]]:
        """Look for sessions that are too old in the background, and delete them in the thread's turn."""
        future = Future[list[str]]()

        def look() -> None:
            try:
                old = self._keeper.old(now)
                self._put(Task(lambda: self._keeper.expire(old, now, self._runs.busy), future, at_once=True))
            except (OSError, StoreError) as error:
                future.set_exception(error)

        self._looks.submit(look)
        return future

    def _log(self, expired: Future[list[str]]) -> None:
        if not self._closed and (error := expired.exception()):
            logger.error("sessions of %s that are too old stay for now", self._root, exc_info=error)

    def _retain(self, retention: Retention, now: float) -> Future[list[str]]:
        self._keeper.retention = retention
        self._look = math.inf if retention.max_session_age_s is None else time.monotonic() + _LOOK_S
        return self._expire(now)


def _sums(batches: Sequence[pa.RecordBatch]) -> list[dict[str, str]]:
    """Checksums, made by the caller: beside what the writer's thread is at."""
    return [described(batch) for batch in batches]
