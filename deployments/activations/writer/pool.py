"""The open segments of one writer: each used by a run, or idle until the next run with its schema."""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pyarrow as pa

from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import FileUpdate
from deployments.activations.files.disk import Mount
from deployments.activations.segments.segment_writer import Segment

FILE_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}-\d{6,}\.arrow")  # of every segment
_SEALS = 4  # files that get their footers at once
_MOST_SEALS = 256  # that wait for one: each is an open file


class Pool:
    """Hands out segments and seals them. For one thread.

    No two writers share a file. A segment that no run has taken is sealed at `segment_bytes`, after `idle_s` seconds,
    or if more than `open_segments` are open; `wake` is called, on any thread, each time one is closed.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        segment_bytes: int,
        open_segments: int,
        idle_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._root, self._mount, self._catalogue, self._wake = root, Mount(root), catalogue, wake
        self._segment_bytes, self._open_segments, self._idle_s = segment_bytes, open_segments, idle_s
        self._taken: set[Segment] = set()
        self._seen: set[Segment] = set()  # in their place, in this round
        self._idle: OrderedDict[Segment, float] = OrderedDict()  # since when, the longest first
        self._closing: dict[Segment, Future[None]] = {}  # the longest first
        self._seals = ThreadPoolExecutor(_SEALS, thread_name_prefix="activation-seal")
        prefix = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        self._names = (f"{prefix}-{number:06}.arrow" for number in count(1))

    @property
    def due(self) -> float:
        """When a segment will have been idle for too long, in the monotonic clock's seconds."""
        return next(iter(self._idle.values()), float("inf")) + self._idle_s

    def take(self, session_id: str, schema: pa.Schema) -> Segment:
        """A segment for one run alone, until it is given back; OSError if a new one is refused."""
        fitting = (
            segment
            for segment in reversed(self._idle)
            if segment.session_id == session_id
            and segment.schema.equals(schema, check_metadata=True)
            and not self._spent(segment)
            and self._is_in_place(segment)
        )
        segment = next(fitting, None)
        if segment:
            del self._idle[segment]
        else:
            self._mount.check()
            segment = Segment(self._root, session_id, next(self._names), schema)
        self._taken.add(segment)
        return segment

    def _is_in_place(self, segment: Segment) -> bool:
        """Whether a file is where it was, looked at once a round: the store of another node may have deleted it."""
        if segment not in self._seen and segment.in_place:
            self._seen.add(segment)
        return segment in self._seen

    def give_back(self, segment: Segment) -> None:
        """The run is finished, or taken away."""
        self._taken.remove(segment)
        self._idle[segment] = time.monotonic()

    def settle(self, unsynced: Collection[Segment]) -> None:
        """Close in the background what is full, broken, idle for too long or too many, but not `unsynced` ones."""
        self._seen.clear()
        self._tell()
        now = time.monotonic()
        for segment, since in [item for item in self._idle.items() if item[0] not in unsynced]:
            many = len(self._idle) + len(self._taken) > self._open_segments
            if many or self._spent(segment) or now - since >= self._idle_s:
                self._close(segment)

    def close(self, session_id: str | None = None) -> None:
        """Close the idle segments of one session, or all; they are closed when this returns."""
        for segment in list(self._idle):
            if session_id in (None, segment.session_id):
                self._close(segment)
        self._tell(wait_for=[segment for segment in self._closing if session_id in (None, segment.session_id)])

    def end(self) -> None:
        """Close all segments for good."""
        self.close()
        self._seals.shutdown()

    @property
    def own(self) -> set[str]:
        """The URIs of the files that are open."""
        return {segment.facts().uri for segment in self._open}

    @property
    def _open(self) -> list[Segment]:
        return [*self._taken, *self._idle, *self._closing]

    def sizes(self) -> Counter[str]:
        """The bytes of each session's files, those that are being written included."""
        sizes = Counter(self._catalogue.sizes(but=self.own))
        for segment in self._open:
            sizes[segment.session_id] += segment.size
        return sizes

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
            self._tell(wait_for=[next(iter(self._closing))])

    def _tell(self, wait_for: Collection[Segment] = ()) -> None:
        """Report closed segments to the catalogue."""
        told = [segment for segment, done in self._closing.items() if done.done() or segment in wait_for]
        for segment in told:
            self._closing.pop(segment).result()
        if added := [FileUpdate(segment.session_id, (), segment.facts()) for segment in told if segment.rows]:
            self._catalogue.add(*added)
