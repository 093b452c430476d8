"""Group commit: one fsync per file makes many runs durable while the writer goes on. Callers are then answered."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import Entry, FileUpdate, StoredRun, explain
from deployments.activations.files.disk import directory
from deployments.activations.segments.segment_writer import Segment
from deployments.activations.writer.open_runs import OpenRuns

_SYNCS = 8  # files that are synced at a time: disks merge requests, and network file systems have latency

_Answer = tuple[Future[StoredRun], Entry]


class _Sync(NamedTuple):
    """A file that is being made durable, and the runs that wait for it."""

    segment: Segment
    done: Future[None]
    runs: Sequence[_Answer]


class Commits:
    """The runs that are written and not durable yet. For one thread; those that wait for the disk are its own.

    One group is made durable at a time; what is written meanwhile is the next one. `wake` is called, on any thread,
    each time a file is durable or cannot be made so: the group may be `ready`.
    """

    def __init__(self, root: Path, catalogue: Catalogue, runs: OpenRuns, wake: Callable[[], None]) -> None:
        self._root, self._catalogue, self._runs, self._wake = root, catalogue, runs, wake
        self._written: dict[Segment, list[_Answer]] = {}
        self._syncs: list[_Sync] = []
        self._threads = ThreadPoolExecutor(_SYNCS, thread_name_prefix="activation-sync")

    @property
    def under_way(self) -> bool:
        """Whether a group is being made durable."""
        return bool(self._syncs)

    @property
    def ready(self) -> bool:
        """Whether a group is, so that `end` would not wait."""
        return self.under_way and all(sync.done.done() for sync in self._syncs)

    @property
    def segments(self) -> set[Segment]:
        """The files that must stay open."""
        return {*self._written, *(sync.segment for sync in self._syncs)}

    def add(self, segment: Segment, *answers: _Answer) -> None:
        """Runs, or more of an unfinished one, are written: the next group syncs the file and answers whole runs."""
        self._written.setdefault(segment, []).extend(answers)

    def begin(self) -> None:
        """Make written rows durable, unless a group commit is already running."""
        if self._syncs or not self._written:
            return
        written, self._written = self._written, {}
        for segment in written:
            segment.begin_sync()
        new = any(not segment.is_named for segment in written)
        root = self._threads.submit(_sync_root, self._root) if new else None  # once, before callers are answered
        self._syncs = [
            _Sync(segment, self._threads.submit(_sync, segment, root), runs) for segment, runs in written.items()
        ]
        for sync in self._syncs:
            sync.done.add_done_callback(lambda _: self._wake())

    def end(self) -> None:
        """Wait for the group that is under way, and answer its runs."""
        syncs, self._syncs = self._syncs, []
        wait([sync.done for sync in syncs])
        durable = list[_Sync]()
        for sync in syncs:
            error = sync.done.exception()
            if isinstance(error, OSError):
                self._fail(sync, error)
            elif error:
                raise error
            else:
                sync.segment.end_sync()
                durable += [sync] if sync.runs else []
        if durable:
            stored = [(sync.segment, [entry for _, entry in sync.runs]) for sync in durable]
            self._catalogue.add(
                *(FileUpdate(segment.session_id, entries, segment.facts()) for segment, entries in stored)
            )
        for sync in durable:
            for future, entry in sync.runs:
                future.set_result(entry.stored())
        for sync in syncs:
            self._runs.forget(entry.facts for _, entry in sync.runs)

    def drain(self) -> None:
        """Make all that is written durable, and answer it."""
        while self._syncs or self._written:
            self.begin()
            self.end()

    def close(self) -> None:
        """Wait for the disk, and end the threads; no further caller gets an answer."""
        self._threads.shutdown()

    def _fail(self, sync: _Sync, error: OSError) -> None:
        """Its file now ends with what was durable before: what was written since is gone as well."""
        sync.segment.fall_back()
        since = self._written.pop(sync.segment, [])
        for future, _ in (*sync.runs, *since):
            future.set_exception(explain(self._root, error.with_traceback(None)))
        self._runs.forget(entry.facts for _, entry in since)
        self._runs.abandon_those(lambda name, run: run.segment is sync.segment, str(explain(self._root, error)))


def _sync_root(root: Path) -> None:
    with directory(root) as top:
        os.fsync(top)


def _sync(segment: Segment, root: Future[None] | None) -> None:
    """Make a file durable, and, where it is new, its name."""
    segment.sync()
    if root and not segment.is_named:
        root.result()
