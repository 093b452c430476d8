"""The writer: appends runs to segments on one thread, with group commit. It answers only once the bytes are durable.

A segment is `<root>/<owner>/<session>/<writer>-000001.arrow`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import pyarrow as pa

from deployments.activations.facts import FileUpdate, RunInfo, RunLocation, RunName, SessionName, StoreError, explain
from deployments.activations.index.index import Index
from deployments.activations.limits import Retention
from deployments.activations.segments.schema import batch_metadata, of_content
from deployments.activations.segments.segment_writer import Segment
from deployments.activations.writer.group_commit import Commits, Report
from deployments.activations.writer.open_runs import Chunk, OpenRuns, RunWriter, check_name
from deployments.activations.writer.pool import Pool
from deployments.activations.writer.recovery import seal_left
from deployments.errors import RequestError

Batches = Sequence[pa.RecordBatch]

logger = logging.getLogger(__name__)

_GATHER_S = 0.02  # for which a commit waits for what still comes, as long as anything does
_LOOK_S = 60.0  # between two looks for sessions that are too old, and files that were left without a footer


class _Call(NamedTuple):
    """A call for the thread; its work may return another future, whose result is the call's."""

    work: Callable[[], Any]
    future: Future[Any]


class Writer:
    """Writes and deletes below one existing root, on a thread of its own.

    All that waits when the thread comes round is appended. While one group of runs is made durable, each of its files
    by one fsync, the next is written; the group is then reported to the index, and its futures are answered. A run
    without a chunk for `lease_s` seconds is abandoned. All methods raise StoreError at once if the writer is closed or
    the session's id can name none; errors of the disk come from the future.

    Args:
        root: The store's directory.
        index: Its index; None for a writer on another node, which keeps no limits and deletes nothing.
        report: Tells the index what is durable, in place of `index.add`; gives the paths of files that are gone.
        on_failure: Called where the thread ends by an error of its own; nothing is answered any more.
        segment_bytes: The size from which a file takes no more runs.
        open_segments: How many files are kept open.
        idle_s: Seconds without a run after which a file is sealed.
        lease_s: Seconds without a chunk after which a run is abandoned.
    """

    def __init__(
        self,
        root: Path,
        index: Index | None,
        *,
        report: Report | None = None,
        on_failure: Callable[[], object] = lambda: None,
        segment_bytes: int = 1 << 30,
        open_segments: int = 64,
        idle_s: float = 30,
        lease_s: float = 6 * 3600,
    ) -> None:
        self._root, self._index = root, index
        if report is None:
            assert index is not None
            report = partial(_add_to_index, index)
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()  # None: something is synced, closed, or at its end
        wake = partial(self._queue.put, None)
        self._pool = Pool(root, report, segment_bytes, open_segments, idle_s, wake)
        self._commits = Commits(root, report, wake)
        self._runs = OpenRuns(root, index, self._pool, self._commits, lease_s)
        self._retainer = self._runs.retainer
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="activation-look")
        self._look = time.monotonic() + _LOOK_S  # when to look for what is too old, or was left
        self._on_failure = on_failure
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="activation-writer", daemon=True)
        self._thread.start()

    @property
    def has_quotas(self) -> bool:
        """Whether any bytes are limited; any thread may ask."""
        return self._retainer is not None and self._retainer.limits.has_quotas

    def append(self, session: SessionName, run_id: str, part: int, batches: Batches, most: int = 0) -> Future[None]:
        """Queue a chunk, after `part` others, of a run that is not finished; answered when it is in the file.

        `most` bytes may the whole run have, if that is known. StoreError, at once or from the future, means that the
        run cannot be finished.
        """
        if not batches:
            raise StoreError(f"Part {part} of run {run_id} has no rows: send it when there are some")
        return self._put_chunk(Chunk(RunName(session, run_id), part, list(batches), None, (), most))

    def submit(self, run: RunInfo, batches: Batches, part: int = 0) -> Future[RunLocation]:
        """Queue a whole run, or its end after `part` chunks; answered when it is durable. Raises as `append`."""
        if not batches and not part:
            raise StoreError(f"Run {run.run_id} has no rows: capture at least one token")
        batch_metadata(run.run_id, 0, 1, run)  # raises for the caller what JSON cannot hold
        return self._put_chunk(Chunk(RunName(run.session, run.run_id), part, list(batches), run, ()))

    def abandon(self, session: SessionName, run_id: str) -> Future[None]:
        """Queue the end of a run that is not finished, known or not; answered when nothing of it is left."""
        return self._put(partial(self._abandon, RunName(session, run_id)))

    def withdraw(self, session: SessionName, run_ids: Sequence[str]) -> Future[bool]:
        """Queue the end of these runs, as `abandon`; answered whether none of them is or will be stored."""
        return self._put(partial(self._withdraw, [RunName(session, run_id) for run_id in run_ids]))

    def delete(self, session: SessionName) -> Future[bool]:
        """Queue a deletion; false if there is none. RequestError if the session is pinned."""
        check_name(session)
        return self._put(partial(self._delete, session))

    def end_runs(self, session: SessionName) -> Future[None]:
        """Queue: abandon a session's open runs, and end its files: another process is about to delete it."""
        return self._put(partial(self._end_runs, session))

    def make_room(self, session: SessionName, size: int, check_only: bool = False) -> Future[None]:
        """Queue: make room for `size` bytes more by the limits, or only check them; StoreError if they refuse."""
        assert self._retainer is not None
        work = self._retainer.check if check_only else self._retainer.make_room
        return self._put(partial(work, session, size))

    def retain(self, retention: Retention, now: float | None = None) -> Future[list[SessionName]]:
        """Queue other limits, looked after each minute; answered with the sessions too old by `now`, once deleted."""

        def work() -> list[SessionName]:
            assert self._retainer is not None
            self._retainer.limits = retention
            return self._retainer.expire(time.time() if now is None else now)

        return self._put(work)

    def close(self) -> None:
        """Finish what is queued, abandon open runs, seal all files, end the thread. May be called twice."""
        with self._closing:
            self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._looks.shutdown()
        if self._retainer:
            self._retainer.close()
        self._commits.close()

    def _put(self, work: Callable[[], Any]) -> Future[Any]:
        call = _Call(work, Future())
        with self._closing:  # nothing is queued after the end
            if self._closed:
                raise StoreError("The activation store is shutting down: send the request again")
            self._queue.put(call)
        return call.future

    def _put_chunk(self, chunk: Chunk) -> Future[Any]:
        chunk.check()
        sums = [of_content(batch) for batch in chunk.batches]  # here, in parallel with the writer's thread
        return self._put(partial(self._write, chunk._replace(sums=sums)))

    # ---- the thread

    def _loop(self) -> None:
        try:
            while self._round():
                pass
            self._runs.abandon_those(lambda *_: True, "the writer was closed")
            self._pool.end()
        except Exception:  # nothing is above this thread
            logger.exception("the writer of %s has ended", self._root)
            self._on_failure()

    def _round(self) -> bool:
        """Serve all that waits; false once the end was among it. Keeps no batch alive once it is written."""
        last = self._closed
        for call in self._calls(last):
            if call.future.set_running_or_notify_cancel():
                self._do(call)
        if self._commits.ready:
            self._end_commit()
        self._commits.begin()
        if last:
            self._drain()
        self._runs.settle()
        self._pool.settle(self._commits.segments)
        if time.monotonic() >= self._look:
            self._look = time.monotonic() + _LOOK_S
            self._look_through()
        return not last

    def _calls(self, last: bool) -> Iterator[_Call]:
        """What is queued, and for `_GATHER_S` what still comes, to share a commit; at the `last` time everything."""
        due = 0.0 if last else min(self._pool.due, self._runs.due, self._look)
        forever = self._commits.under_way and not last  # its end comes by the queue as well
        with contextlib.suppress(Empty):
            call = self._queue.get(timeout=None if forever else max(0.0, due - time.monotonic()))
            until = time.monotonic() + _GATHER_S
            while True:
                if call:
                    yield call
                if not last and time.monotonic() >= until:
                    return
                call = self._queue.get_nowait()

    def _do(self, call: _Call) -> None:
        try:
            result = call.work()
            if isinstance(result, Future):
                result.add_done_callback(partial(self._pass_on, call.future))
            else:
                call.future.set_result(result)
        except (OSError, StoreError, RequestError) as error:
            self._fail(call.future, error)

    def _pass_on(self, to: Future[Any], done: Future[Any]) -> None:
        """Answer with what was done in the background."""
        if (error := done.exception()) is None:
            to.set_result(done.result())
        else:
            self._fail(to, error)

    def _fail(self, future: Future[Any], error: BaseException) -> None:
        future.set_exception(explain(self._root, error) if isinstance(error, OSError) else error)

    def _end_commit(self) -> None:
        """Answer the runs of the group that is durable; open runs of files that failed are lost."""
        for segment, error in self._commits.end().items():
            self._runs.abandon_those(partial(_is_on, segment), str(explain(self._root, error)))

    def _drain(self) -> None:
        """Make all that is written durable, and answer it."""
        while self._commits.segments:
            self._commits.begin()
            self._end_commit()

    def _write(self, chunk: Chunk) -> Future[RunLocation] | None:
        try:
            return self._runs.write(chunk)
        finally:
            chunk.batches.clear()

    def _abandon(self, name: RunName) -> None:
        segment = self._runs.abandon(name, f"Run {name.run_id} was abandoned: send the request again.")
        if segment and not segment.rows and segment in self._commits.segments:
            self._drain()  # a file that no run is in goes once nothing of it is being synced
        self._pool.settle(self._commits.segments)

    def _withdraw(self, names: Sequence[RunName]) -> bool:
        self._drain()  # it may be written, and not durable yet
        for name in names:
            self._abandon(name)
        return not any(self._runs.is_stored(name) for name in names)

    def _delete(self, session: SessionName) -> Future[bool]:
        assert self._retainer is not None
        assert self._index is not None
        if session in self._index.pinned():
            message = f"session {session.id!r} is pinned: unpin it before you delete it"
            raise RequestError(message, "session_id", "session_pinned", 409)
        self._end_runs(session)
        return self._retainer.delete(session)

    def _end_runs(self, session: SessionName) -> None:
        self._drain()
        reason = f"Session {session.id} was deleted while the run went on: send the request again."
        self._runs.abandon_those(lambda name, _: name.session == session, reason)
        self._pool.close(session)

    def _look_through(self) -> None:
        """Delete what is too old, and seal in the background the files that nobody writes any more."""
        if self._retainer and self._index:
            self._retainer.expire(time.time())
            left = set(self._index.unsealed()) - {segment.path for segment in self._pool.open}
            if left:  # by writers of other nodes, some of which may have been killed, or on a full disk
                self._looks.submit(self._seal_left, {SessionName.of_folder(path.rpartition("/")[0]) for path in left})

    def _seal_left(self, sessions: Set[SessionName]) -> None:
        assert self._index is not None
        try:
            seal_left(self._root, of=sessions)
            self._index.look(sessions)
        except (OSError, StoreError):
            logger.exception("files without a footer are sealed at the next start")


def _is_on(segment: Segment, _: RunName, run: RunWriter) -> bool:
    return run.segment is segment


def _add_to_index(index: Index, updates: Sequence[FileUpdate]) -> Collection[str]:
    index.add(*updates)
    return ()
