"""The writer: appends runs to segments on one thread, with group commit. It answers only once the bytes are durable.

A segment is `<root>/<session_id>/<writer>-000001.arrow`.

More than 300 lines, because each method for callers stands beside the thread's method that does the work.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pyarrow as pa

from deployments.accounts import OPERATOR, Account
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import Entry, FileUpdate, RunFacts, RunName, StoredRun, StoreError, explain
from deployments.activations.files.places import path_of
from deployments.activations.limits import Retention
from deployments.activations.segments.checksums import described
from deployments.activations.segments.schema import batch_metadata
from deployments.activations.segments.segment_writer import Segment
from deployments.activations.state.owners import Owners
from deployments.activations.writer.group_commit import Commits
from deployments.activations.writer.open_runs import Chunk, OpenRuns, check_name
from deployments.activations.writer.pool import Pool
from deployments.activations.writer.recovery import seal_left
from deployments.activations.writer.retention import SessionManager
from deployments.errors import RequestError

if TYPE_CHECKING:
    from deployments.activations.archive.archive import Archive
    from deployments.activations.state.nodes import Nodes

_T = TypeVar("_T")
Batches = Sequence[pa.RecordBatch]

logger = logging.getLogger(__name__)

_GATHER_S = 0.02  # for which a commit waits for what still comes, as long as anything does
_LOOK_S = 60.0  # between two looks for sessions that are too old, and files that were left without a footer
_SYNC_BYTES = 64 << 20  # an open run's bytes are fsynced in pieces of this size, so that no commit waits for gigabytes


class _QueuedCall(NamedTuple):
    """A call for the thread: in its turn, or `behind` the commits of its round."""

    work: Callable[[], Any]
    future: Future[Any]
    behind: bool = False


class _WrittenRun(NamedTuple):
    """A whole run in its file: its call is answered by the commit that makes it durable."""

    segment: Segment
    entry: Entry


class Writer:
    """Writes and deletes below one existing root, on a thread of its own; the catalogue follows.

    All that waits when the thread comes round is appended. While one group of runs is made durable, each of its files
    by one fsync, the next is written; then the group's futures are answered. A run without a chunk for `lease_s`
    seconds is abandoned. All methods raise StoreError at once if the writer is closed or `session_id` can name no
    session; errors of the disk come from the future.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        *,
        segment_bytes: int = 1 << 30,
        open_segments: int = 64,
        idle_s: float = 30,
        lease_s: float = 900,
        owners: Owners | None = None,
        archive: Archive | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        self._root, self._catalogue = root, catalogue
        self._queue: SimpleQueue[_QueuedCall | None] = SimpleQueue()  # None: something is synced, closed, or at its end
        wake = partial(self._queue.put, None)
        self._pool = Pool(root, catalogue, segment_bytes, open_segments, idle_s, wake)
        self._manager = SessionManager(root, catalogue, self._pool, owners, archive, nodes)
        self._runs = OpenRuns(root, catalogue, self._pool, self._manager, lease_s)
        self._commits = Commits(root, catalogue, self._runs, wake)
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="activation-expiry")
        self._look = time.monotonic() + _LOOK_S  # when to look for what is too old, or was left
        self._unsealable = set[str]()  # the URIs of files that get no footer
        self._asked: list[Future[Any]] = []  # and perhaps not answered
        self._closing = threading.Lock()
        self._closed = self._failed = False
        self._thread = threading.Thread(target=self._loop, name="activation-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs and has not failed."""
        return self._thread.is_alive() and not self._failed

    def append(
        self, session_id: str, run_id: str, part: int, batches: Batches, most: int = 0, fence: str | None = None
    ) -> Future[None]:
        """Queue a chunk, after `part` others, of a run that is not finished; answered when it is in the file.

        `most` bytes may the whole run have, if that is known; `fence` is as for `Owners.check`. StoreError, at once or
        from the future, means that the run cannot be finished.
        """
        if not batches:
            raise StoreError(f"Part {part} of run {run_id} has no rows: send it when there are some")
        return self._put_chunk(Chunk(RunName(session_id, run_id), part, list(batches), None, (), most, fence))

    def submit(self, run: RunFacts, batches: Batches, part: int = 0, fence: str | None = None) -> Future[StoredRun]:
        """Queue a whole run, or its end after `part` chunks; answered when it is durable. Raises as `append`."""
        if not batches and not part:
            raise StoreError(f"Run {run.run_id} has no rows: capture at least one token")
        batch_metadata(run.run_id, 0, 1, run)  # raises for the caller what JSON cannot hold
        return self._put_chunk(Chunk(RunName(run.session_id, run.run_id), part, list(batches), run, (), fence=fence))

    def abandon(self, session_id: str, run_id: str) -> Future[None]:
        """Queue the end of a run that is not finished, known or not; answered when nothing of it is left."""
        return self._put(partial(self._abandon, RunName(session_id, run_id)))

    def withdraw(self, session_id: str, run_ids: Sequence[str]) -> Future[bool]:
        """Queue the end of these runs, as `abandon`; answered whether none of them is or will be stored."""
        return self._put(partial(self._withdraw, [RunName(session_id, run_id) for run_id in run_ids]), behind=True)

    def renew(self, session_id: str, run_id: str) -> Future[None]:
        """Queue: a run that is not finished goes on, though nothing of it may come for longer than the lease."""
        return self._put(partial(self._runs.renew, RunName(session_id, run_id)))

    def delete(
        self, session_id: str, account: Account = OPERATOR, unless: Callable[[Set[str]], bool] | None = None
    ) -> Future[bool]:
        """Queue a deletion; false if there is none, or `unless` keeps it, given the sessions that are written to."""
        check_name(session_id)
        return self._put(partial(self._delete, session_id, account, unless), behind=unless is not None)

    def ask(self, work: Callable[[SessionManager], _T]) -> Future[_T]:
        """Queue a call of the writer's `SessionManager`, as in `ask(lambda manager: manager.pin("s", True))`."""
        return self._put(lambda: work(self._manager))

    def retain(self, retention: Retention, now: float | None = None) -> Future[list[str]]:
        """Queue other limits, looked after each minute; answered with the sessions too old by `now`, once deleted."""

        def work() -> Future[list[str]]:
            self._manager.retention = retention
            self._look = time.monotonic() + _LOOK_S
            return self._expire(time.time() if now is None else now)

        return self._put(work)

    def end_runs(self, session_id: str) -> Future[None]:
        """Queue: abandon a session's open runs, and end its files: another node's writer is about to delete it."""
        return self._put(lambda: self._end_runs(session_id), behind=True)

    def seal(self, session_id: str | None) -> Future[None]:
        """Queue: end a session's files, or all, that no run is being written to, so that they can be archived."""
        return self._put(lambda: self._pool.close(session_id), behind=True)

    @property
    def has_quotas(self) -> bool:
        """Whether any bytes are limited; any thread may ask."""
        return self._manager.retention.has_quotas

    def close(self) -> None:
        """Finish what is queued, abandon open runs, seal all files, end the thread. May be called twice."""
        with self._closing:
            self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._looks.shutdown()
        self._manager.close()
        self._commits.close()

    def _put(self, work: Callable[[], Any], behind: bool = False) -> Future[Any]:
        request = _QueuedCall(work, Future(), behind)
        with self._closing:  # nothing is queued after the end
            if self._closed:
                raise StoreError("The activation store is shutting down: send the request again")
            self._queue.put(request)
        return request.future

    def _put_chunk(self, chunk: Chunk) -> Future[Any]:
        chunk.check()
        sums = [described(batch) for batch in chunk.batches]  # here, in parallel with the writer's thread
        return self._put(partial(self._write, chunk._replace(sums=sums)))

    # ---- the thread

    def _loop(self) -> None:
        try:
            while self._round():
                pass
            self._runs.abandon_those(lambda *_: True, "the writer was closed")
            self._pool.end()
        except Exception:  # nothing is above this thread: all callers that wait get the error
            logger.exception("the writer of %s has ended", self._root)
            self._fail_all()

    def _fail_all(self) -> None:
        """Fail all callers that wait, and refuse further ones."""
        with self._closing:
            self._closed = True
        self._queued()
        self._commits.close()
        with contextlib.suppress(Exception):  # the error may come from these very files
            self._runs.abandon_those(lambda *_: True, "the writer has failed")
            self._pool.end()
        self._failed = True  # a caller may use another writer at once
        for future in self._asked:
            if not future.done():
                future.set_exception(StoreError("The activation store failed, its log says why: send it again"))

    def _round(self) -> bool:
        """Serve all that waits; false once the end was among it. Keeps no batch alive once it is written."""
        requests, until = self._waiting(), time.monotonic() + _GATHER_S
        last = self._closed
        if last:  # nothing more comes
            requests += self._queued()
        behind = list[_QueuedCall]()
        while requests:
            request = requests.popleft()
            if not requests and time.monotonic() < until:  # what came while this was written shares its commit
                requests = self._queued()
            if not request.future.set_running_or_notify_cancel():
                continue
            if request.behind:
                behind.append(request)
            else:
                self._do(request)
        if self._commits.ready:
            self._commits.end()
        self._commits.begin()
        if behind or last:
            self._commits.drain()
        self._runs.settle(self._commits.segments)
        self._pool.settle(self._commits.segments)
        for request in behind:
            self._do(request)
        if time.monotonic() >= self._look:
            self._look = time.monotonic() + _LOOK_S
            self._looks.submit(self._seal_left)
            self._expire(time.time()).add_done_callback(self._log)
        return not last

    def _waiting(self) -> deque[_QueuedCall]:
        """All that waits, or nothing once something is due."""
        self._asked = [future for future in self._asked if not future.done()]
        due = min(self._pool.due, self._runs.due, self._look)
        forever = self._commits.under_way  # its end comes by the queue as well
        try:
            first = self._queue.get(timeout=None if forever else max(0.0, due - time.monotonic()))
        except Empty:
            return deque()
        return self._queued(first)

    def _queued(self, first: _QueuedCall | None = None) -> deque[_QueuedCall]:
        """This request and all that are queued; each must get a result or an error."""
        requests = deque([first] if first else [])
        while not self._queue.empty():  # this thread alone takes from it
            if request := self._queue.get():
                requests.append(request)
        self._asked += [request.future for request in requests]
        return requests

    def _do(self, request: _QueuedCall) -> None:
        try:
            result = request.work()
        except OSError as error:
            request.future.set_exception(explain(self._root, error))
        except (StoreError, RequestError) as error:
            request.future.set_exception(error)
        else:
            if isinstance(result, _WrittenRun):
                self._commits.add(result.segment, (request.future, result.entry))
            elif isinstance(result, Future):
                result.add_done_callback(lambda done: self._pass_on(done, request.future))
            else:
                request.future.set_result(result)

    def _pass_on(self, done: Future[Any], to: Future[Any]) -> None:
        """Answer with what was done in the background, unless the writer has failed meanwhile."""
        if to.done():
            return
        if (error := done.exception()) is None:
            to.set_result(done.result())
        else:
            to.set_exception(explain(self._root, error) if isinstance(error, OSError) else error)

    def _write(self, chunk: Chunk) -> _WrittenRun | None:
        try:
            segment, entry = self._runs.write(chunk)
        finally:
            chunk.batches.clear()
        if entry:
            return _WrittenRun(segment, entry)
        if segment.unsynced >= _SYNC_BYTES:
            self._commits.add(segment)
        return None

    def _abandon(self, name: RunName) -> None:
        segment = self._runs.abandon(name, f"Run {name.run_id} was abandoned: send the request again.")
        if segment and not segment.rows and segment in self._commits.segments:
            self._commits.drain()  # a file that no run is in goes once nothing of it is being synced
        self._pool.settle(self._commits.segments)

    def _withdraw(self, names: Sequence[RunName]) -> bool:
        for name in names:
            self._abandon(name)
        return not any(self._runs.is_stored(name) for name in names)

    def _delete(
        self, session_id: str, account: Account, unless: Callable[[Set[str]], bool] | None
    ) -> bool | Future[bool]:
        if (unless and unless(self._runs.busy())) or not self._manager.may_delete(session_id, account):
            return False
        if any(segment.session_id == session_id for segment in self._commits.segments):
            self._commits.drain()
        self._end_runs(session_id)
        return self._manager.delete(session_id)

    def _end_runs(self, session_id: str) -> None:
        reason = f"Session {session_id} was deleted while the run went on."
        self._runs.abandon_those(lambda name, _: name.session_id == session_id, reason)
        self._pool.close(session_id)

    def _expire(self, now: float) -> Future[list[str]]:
        """Look for sessions that are too old in the background, and delete each in a turn of its own."""

        def expire() -> list[str]:
            old = self._manager.old(now)
            return [name for name in old if self._put(partial(self._manager.expire, name, now)).result()]

        return self._looks.submit(expire)

    def _seal_left(self) -> None:
        """Seal files that nobody writes: of writers of other nodes that were killed, or on a disk that was full."""
        try:
            left = set(self._catalogue.unsealed()) - self._unsealable
            for uri in left and left - self._put(lambda: self._pool.own).result():
                known = {entry.facts.run_id for entry in self._catalogue.of_file(uri)}
                try:
                    if update := seal_left(path_of(uri), known):
                        self._put(partial(self._add_left, update)).result()
                except StoreError:
                    raise
                except OSError as error:  # of this file, perhaps
                    logger.error("%s is sealed later: %s", uri, error)
                except Exception:  # whatever is in it: the other files are sealed all the same
                    logger.exception("%s cannot be sealed: it is left as it is", uri)
                    self._unsealable.add(uri)
        except StoreError as error:
            if not self._closed:
                logger.error("files without a footer are sealed later: %s", error)

    def _add_left(self, update: FileUpdate) -> None:
        if path_of(update.file.uri).exists():  # its session was not deleted meanwhile
            self._catalogue.add(update)

    def _log(self, expired: Future[list[str]]) -> None:
        if not self._closed and (error := expired.exception()):
            logger.error("sessions of %s that are too old stay for now", self._root, exc_info=error)
