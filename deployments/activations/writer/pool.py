"""The open segments of one writer: each used by a run, or idle until the next run with its schema."""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pyarrow as pa

from deployments.activations.facts import FileUpdate, SessionName
from deployments.activations.segments.segment_writer import Segment
from deployments.activations.writer.group_commit import Report

FILE_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}-\d{6,}\.arrow")  # of every segment
_SEALS = 4  # files that get their footers at once
_MOST_SEALS = 256  # that wait for one: each is an open file


class Pool:
    """Hands out segments and seals them. For one thread.

    No two writers share a file. A segment that no run uses is sealed at `segment_bytes`, after `idle_s` seconds, or if
    more than `open_segments` are open; `report` is then called with it. `wake` is called, on any thread, each time one
    is closed.
    """

    def __init__(
        self,
        root: Path,
        report: Report,
        segment_bytes: int,
        open_segments: int,
        idle_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._root, self._report, self._wake = root, report, wake
        self._is_mounted = os.path.ismount(root)  # then it must stay so: else files are written below it, unseen
        self._segment_bytes, self._open_segments, self._idle_s = segment_bytes, open_segments, idle_s
        self._taken: set[Segment] = set()
        self._idle: OrderedDict[Segment, float] = OrderedDict()  # since when, the longest first
        self._closing: dict[Segment, Future[None]] = {}  # the longest first
        self._seals = ThreadPoolExecutor(_SEALS, thread_name_prefix="activation-seal")
        prefix = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        self._names = (f"{prefix}-{number:06}.arrow" for number in count(1))

    @property
    def due(self) -> float:
        """When a segment will have been idle for too long, in the monotonic clock's seconds."""
        return next(iter(self._idle.values()), float("inf")) + self._idle_s

    def take(self, session: SessionName, schema: pa.Schema) -> Segment:
        """A segment for one run alone, until it is given back; OSError if a new one is refused."""
        fitting = (
            segment
            for segment in reversed(self._idle)
            if segment.session == session
            and segment.schema.equals(schema, check_metadata=True)
            and not self._spent(segment)
            and segment.in_place  # another process may have deleted it
        )
        segment = next(fitting, None)
        if segment:
            del self._idle[segment]
        else:
            if self._is_mounted and not os.path.ismount(self._root):
                raise FileNotFoundError(errno.ENOENT, "nothing is mounted there any more", str(self._root))
            segment = Segment(self._root, session, next(self._names), schema)
        self._taken.add(segment)
        return segment

    def give_back(self, segment: Segment) -> None:
        """The run is finished, or taken away."""
        self._taken.remove(segment)
        self._idle[segment] = time.monotonic()

    def settle(self, unsynced: Collection[Segment]) -> None:
        """Close in the background what is full, broken, idle for too long or too many, but not `unsynced` ones."""
        self._report_closed()
        now = time.monotonic()
        for segment, since in [item for item in self._idle.items() if item[0] not in unsynced]:
            many = len(self._idle) + len(self._taken) > self._open_segments
            if many or self._spent(segment) or now - since >= self._idle_s:
                self._close(segment)

    def close(self, session: SessionName | None = None) -> None:
        """Close the idle segments of one session, or all; they are closed when this returns."""
        for segment in list(self._idle):
            if session in (None, segment.session):
                self._close(segment)
        self._report_closed(wait_for=[segment for segment in self._closing if session in (None, segment.session)])

    def end(self) -> None:
        """Close all segments for good."""
        self.close()
        self._seals.shutdown()

    @property
    def open(self) -> list[Segment]:
        """The files that are open."""
        return [*self._taken, *self._idle, *self._closing]

    def _spent(self, segment: Segment) -> bool:
        return segment.broken or segment.length >= self._segment_bytes

    def _close(self, segment: Segment) -> None:
        del self._idle[segment]
        if not segment.rows:  # nothing waits for the disk
            segment.close()
            return
        self._closing[segment] = self._seals.submit(segment.close)
        self._closing[segment].add_done_callback(lambda _: self._wake())
        if len(self._closing) > _MOST_SEALS:
            self._report_closed(wait_for=[next(iter(self._closing))])

    def _report_closed(self, wait_for: Collection[Segment] = ()) -> None:
        """Report closed segments."""
        ended = [segment for segment, done in self._closing.items() if done.done() or segment in wait_for]
        for segment in ended:
            self._closing.pop(segment).result()
        if closed := [FileUpdate(segment.session, (), segment.facts()) for segment in ended if segment.rows]:
            self._report(closed)
