"""The shards of one writer that are open: taken by a run, or idle until the next run of their schema."""

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
from deployments.activations.files.mounts import Mount
from deployments.activations.segments.segment_writer import Shard

FILE_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}-\d{6,}\.arrow")  # of every shard
_SEALS = 4  # files that get their footers at once
_MOST_SEALS = 256  # that wait for one: each is an open file


class Pool:
    """Hands out shards and seals them. For one thread.

    Each pool names its files after itself and creates them exclusively, so that two writers on one root
    never share a file; nor is a file of an earlier writer ever appended to.

    Args:
        root: As for `Writer`, with the next four. Shards that are taken are never sealed.
        catalogue: Told of each file that is closed.
        shard_bytes: A shard of at least this length is sealed.
        open_shards: How many stay open.
        idle_s: Seconds that a shard waits for another run.
        wake: Called, on any thread, each time a shard is closed: `settle` tells of it.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        *,
        shard_bytes: int,
        open_shards: int,
        idle_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._root = root
        self._mount = Mount(root)
        self._catalogue = catalogue
        self._shard_bytes = shard_bytes
        self._open_shards = open_shards
        self._idle_s = idle_s
        self._wake = wake
        self._taken: set[Shard] = set()
        self._idle: OrderedDict[Shard, float] = OrderedDict()  # since when, the longest first
        self._closing: dict[Shard, Future[None]] = {}  # the longest first
        self._seals = ThreadPoolExecutor(_SEALS, thread_name_prefix="activation-seal")
        self._looks = -1  # of the catalogue, when it was last asked for what `_counted` gives
        self._counted()
        prefix = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        self._names = (f"{prefix}-{number:06}.arrow" for number in count(1))

    @property
    def due(self) -> float:
        """When a shard will have been idle for too long, in the monotonic clock's seconds."""
        return next(iter(self._idle.values()), float("inf")) + self._idle_s

    def take(self, session_id: str, schema: pa.Schema) -> Shard:
        """A shard for one run alone, of its session and its batches' schema, until it is given back.

        Raises:
            OSError: If a new one was needed and the disk refused.
        """
        fitting = (
            shard
            for shard in reversed(self._idle)
            if shard.session_id == session_id
            and shard.schema.equals(schema, check_metadata=True)
            and not self._spent(shard)
            and shard.in_place  # the store of another node may have deleted it
        )
        shard = next(fitting, None)
        if shard:
            del self._idle[shard]
        else:
            self._mount.check()
            shard = Shard(self._root, session_id, next(self._names), schema)
        self._taken.add(shard)
        return shard

    def give_back(self, shard: Shard) -> None:
        """The run is finished, or taken away."""
        self._taken.remove(shard)
        self._idle[shard] = time.monotonic()

    def settle(self, unsynced: Collection[Shard]) -> None:
        """Close in the background what is full, broken, idle for too long or too many, but not `unsynced` ones.

        The catalogue is told of what is closed.
        """
        self._tell()
        now = time.monotonic()
        for shard, since in [item for item in self._idle.items() if item[0] not in unsynced]:
            many = len(self._idle) + len(self._taken) > self._open_shards
            if many or self._spent(shard) or now - since >= self._idle_s:
                self._close(shard)

    def close(self, session_id: str | None = None) -> None:
        """Close the idle shards of one session, or all; they are closed when this returns."""
        for shard in list(self._idle):
            if session_id in (None, shard.session_id):
                self._close(shard)
        self._tell(wait_for=[shard for shard in self._closing if session_id in (None, shard.session_id)])

    def end(self) -> None:
        """Close all shards for good."""
        self.close()
        self._seals.shutdown()

    @property
    def own(self) -> set[str]:
        """The URIs of the files that are open."""
        return {shard.facts().uri for shard in self._open}

    @property
    def _open(self) -> list[Shard]:
        return [*self._taken, *self._idle, *self._closing]

    def sizes(self) -> Counter[str]:
        """The bytes of each session's files, those that are being written included."""
        sizes = Counter(self._counted())
        for shard in self._open:
            sizes[shard.session_id] += shard.size
        return sizes

    def used(self, session_id: str | None = None) -> int:
        """The same of one session, or of all together."""
        closed = self._counted()
        being_written = sum(shard.size for shard in self._open if session_id in (None, shard.session_id))
        return being_written + (self._total if session_id is None else closed[session_id])

    def count(self, session_id: str, more: int) -> None:
        """Closed files of a session, or another writer's, have so many bytes more than were counted."""
        self._closed[session_id] += more
        self._total += more

    def forget(self, session_id: str) -> None:
        """A session was deleted, of which no shard is open."""
        self._total -= self._counted().pop(session_id, 0)

    def _counted(self) -> Counter[str]:
        """What the catalogue said of all files but those that are open here, and what was counted since."""
        if self._looks != self._catalogue.looks:
            self._looks = self._catalogue.looks
            self._closed = Counter(self._catalogue.sizes(but=self.own))
            self._total = self._closed.total()
        return self._closed

    def _spent(self, shard: Shard) -> bool:
        return shard.broken or shard.length >= self._shard_bytes

    def _close(self, shard: Shard) -> None:
        del self._idle[shard]
        if not shard.rows:  # nothing waits for the disk
            shard.close()
            return
        self._closing[shard] = self._seals.submit(shard.close)
        self._closing[shard].add_done_callback(lambda _: self._wake())
        if len(self._closing) > _MOST_SEALS:
            self._tell(wait_for=[next(iter(self._closing))])

    def _tell(self, wait_for: Collection[Shard] = ()) -> None:
        """Tell the catalogue of the shards that are closed."""
        told = [shard for shard, done in self._closing.items() if done.done() or shard in wait_for]
        for shard in told:
            self._closing.pop(shard).result()
            self.count(shard.session_id, shard.length if shard.rows else 0)
        added = [(shard.session_id, (), shard.facts()) for shard in told if shard.rows]
        if added:
            self._catalogue.add_all(added)
