"""The open shards of one writer: each used by a run, or idle until the next run with its schema."""

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
from deployments.activations.facts import Note
from deployments.activations.files.disk import Mount
from deployments.activations.segments.segment_writer import Shard

FILE_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}-\d{6,}\.arrow")  # of every shard
_SEALS = 4  # files that get their footers at once
_MOST_SEALS = 256  # that wait for one: each is an open file


class Pool:
    """Hands out shards and seals them. For one thread.

    No two writers share a file. A shard that no run has taken is sealed at `shard_bytes`, after `idle_s` seconds, or if
    more than `open_shards` are open; `wake` is called, on any thread, each time one is closed.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        shard_bytes: int,
        open_shards: int,
        idle_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._root, self._mount, self._catalogue, self._wake = root, Mount(root), catalogue, wake
        self._shard_bytes, self._open_shards, self._idle_s = shard_bytes, open_shards, idle_s
        self._taken: set[Shard] = set()
        self._seen: set[Shard] = set()  # in their place, in this round
        self._idle: OrderedDict[Shard, float] = OrderedDict()  # since when, the longest first
        self._closing: dict[Shard, Future[None]] = {}  # the longest first
        self._seals = ThreadPoolExecutor(_SEALS, thread_name_prefix="activation-seal")
        prefix = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        self._names = (f"{prefix}-{number:06}.arrow" for number in count(1))

    @property
    def due(self) -> float:
        """When a shard will have been idle for too long, in the monotonic clock's seconds."""
        return next(iter(self._idle.values()), float("inf")) + self._idle_s

    def take(self, session_id: str, schema: pa.Schema) -> Shard:
        """A shard for one run alone, until it is given back; OSError if a new one is refused."""
        fitting = (
            shard
            for shard in reversed(self._idle)
            if shard.session_id == session_id
            and shard.schema.equals(schema, check_metadata=True)
            and not self._spent(shard)
            and self._is_in_place(shard)
        )
        shard = next(fitting, None)
        if shard:
            del self._idle[shard]
        else:
            self._mount.check()
            shard = Shard(self._root, session_id, next(self._names), schema)
        self._taken.add(shard)
        return shard

    def _is_in_place(self, shard: Shard) -> bool:
        """Whether a file is where it was, looked at once a round: the store of another node may have deleted it."""
        if shard not in self._seen and shard.in_place:
            self._seen.add(shard)
        return shard in self._seen

    def give_back(self, shard: Shard) -> None:
        """The run is finished, or taken away."""
        self._taken.remove(shard)
        self._idle[shard] = time.monotonic()

    def settle(self, unsynced: Collection[Shard]) -> None:
        """Close in the background what is full, broken, idle for too long or too many, but not `unsynced` ones."""
        self._seen.clear()
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
        sizes = Counter(self._catalogue.sizes(but=self.own))
        for shard in self._open:
            sizes[shard.session_id] += shard.size
        return sizes

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
        if added := [Note(shard.session_id, (), shard.facts()) for shard in told if shard.rows]:
            self._catalogue.add(*added)
