"""Group commit: one fsync per file makes many runs durable while the writer goes on. Callers are then answered."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from deployments.activations.facts import FileUpdate, RunLocation, RunName, RunRecord, explain
from deployments.activations.files.disk import directory
from deployments.activations.segments.segment_writer import Segment

_SYNCS = 8  # files that are synced at a time: disks merge requests, and network file systems have latency

Report = Callable[[Sequence[FileUpdate]], Collection[str]]  # gives the paths of files that are gone
_Group = dict[Segment, list[tuple[Future[RunLocation], RunRecord]]]


class Commits:
    """The runs that are written and not durable yet. For one thread; those that wait for the disk are its own.

    One group is made durable at a time; what is written meanwhile is the next one. `report` is called, on another
    thread, with what is durable before callers are answered. `wake` is called, on any thread, when a group is `ready`.
    """

    def __init__(self, root: Path, report: Report, wake: Callable[[], None]) -> None:
        self._root, self._report, self._wake = root, report, wake
        self.runs = set[RunName]()  # whole ones that are not durable yet
        self._owners = set[Path]()  # directories whose names are durable
        self._written: _Group = {}
        self._group: _Group = {}
        self._done: Future[dict[Segment, OSError]] | None = None  # the files that could not be made durable
        self._threads = ThreadPoolExecutor(_SYNCS, thread_name_prefix="activation-sync")
        self._groups = ThreadPoolExecutor(1, thread_name_prefix="activation-commit")

    @property
    def under_way(self) -> bool:
        """Whether a group is being made durable."""
        return self._done is not None

    @property
    def ready(self) -> bool:
        """Whether a group is durable, so that `end` would not wait."""
        return self._done is not None and self._done.done()

    @property
    def segments(self) -> set[Segment]:
        """The files that must stay open."""
        return {*self._written, *self._group}

    def add(self, segment: Segment, entry: RunRecord | None = None) -> Future[RunLocation]:
        """A run, or more of one, is written: the next group syncs the file, and answers for a whole run."""
        answer, waiting = Future[RunLocation](), self._written.setdefault(segment, [])
        if entry:
            waiting.append((answer, entry))
            self.runs.add(RunName(entry.facts.session, entry.facts.run_id))
        return answer

    def begin(self) -> None:
        """Make written rows durable, unless a group commit is already running."""
        if self._done or not self._written:
            return
        self._group, self._written = self._written, {}
        for segment in self._group:
            segment.begin_sync()
        self._done = self._groups.submit(self._make_durable, self._group)
        self._done.add_done_callback(lambda _: self._wake())

    def end(self) -> dict[Segment, OSError]:
        """Wait for the group that is under way, and answer its runs.

        Returns the files that failed: what was written to these since is gone, too.
        """
        if self._done is None:
            return {}
        done, group, self._done, self._group = self._done, self._group, None, {}
        failed = done.result()
        for segment, answers in group.items():
            if segment in failed:
                segment.fall_back()
                answers = answers + self._written.pop(segment, [])
            for future, entry in answers:
                self.runs.discard(RunName(entry.facts.session, entry.facts.run_id))
                if segment in failed:
                    future.set_exception(explain(self._root, failed[segment].with_traceback(None)))
                else:
                    future.set_result(entry.location())
        return failed

    def close(self) -> None:
        """Wait for the disk, and end the threads; no further caller gets an answer."""
        self._groups.shutdown()
        self._threads.shutdown()

    def _make_durable(self, group: _Group) -> dict[Segment, OSError]:
        owners = {(self._root / segment.session.folder).parent for segment in group if not segment.is_named}
        roots = [self._root] if owners - self._owners else []
        above = [self._threads.submit(_sync_folder, path) for path in (*roots, *owners)]
        syncs = {segment: self._threads.submit(segment.sync) for segment in group}
        lost = next((error for sync_above in above if (error := sync_above.exception())), None)
        self._owners |= set() if lost else owners
        failed = dict[Segment, OSError]()
        for segment, sync in syncs.items():
            error = sync.exception() or (None if segment.is_named else lost)
            if error is None:
                segment.end_sync()
            elif isinstance(error, OSError):
                failed[segment] = error
            else:
                raise error
        updates = [
            FileUpdate(segment.session, [entry for _, entry in answers], segment.facts())
            for segment, answers in group.items()
            if answers and segment not in failed
        ]
        gone = set(self._report(updates)) if updates else set()
        for segment in group:
            if segment.path in gone:
                failed[segment] = FileNotFoundError(errno.ENOENT, "its session was deleted", segment.path)
        return failed


def _sync_folder(path: Path) -> None:
    with directory(path) as folder:
        os.fsync(folder)
