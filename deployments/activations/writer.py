"""Append runs to shards: one thread, group commit, and no answer before the bytes are on disk.

    <root>/<session_id>/<writer>-000001.arrow

Each writer names its files after itself and creates them exclusively, so that two writers on one root
never share a file; nor is a file of an earlier writer ever appended to.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import pyarrow as pa

from deployments.activations.catalogue import Catalogue, Entry
from deployments.activations.facts import RunFacts, StoredRun, StoreError, check_session_id
from deployments.activations.schema import batch_metadata, shard_facts
from deployments.activations.shard import Shard, directory

_TRASH = ".deleted-"  # no session id begins with '.'

_ADVICE = {
    errno.ENOSPC: "free space on the disk, or delete sessions",
    errno.EDQUOT: "free space under the quota, or delete sessions",
    errno.EFBIG: "raise the limit on file sizes, or make shards smaller",
    errno.EACCES: "let the server's user write there",
    errno.EPERM: "let the server's user write there",
    errno.EROFS: "remount the file system for writing",
    errno.ENOENT: "put the directory back, or mount it again",
    errno.ENOTDIR: "remove what stands where the session's directory belongs",
    errno.ELOOP: "remove the link where the session's directory belongs",
    errno.EMFILE: "raise the limit on open files",
}


class _Write(NamedTuple):
    run: RunFacts
    batches: list[pa.RecordBatch]
    metadata: list[dict[str, str]]
    future: Future[StoredRun]


class _Delete(NamedTuple):
    session_id: str
    future: Future[bool]


class Writer:
    """Writes and deletes under one root, on a thread of its own; the catalogue follows.

    All runs waiting when the thread comes round are appended, each touched file is fsynced once, and
    then their futures are answered.

    Args:
        root: An existing directory, absolute and no link.
        catalogue: Told of each run once it is on disk.
        shard_bytes: A shard of at least this length is sealed; one run is never split.
        open_shards: How many shards stay open; the one idle the longest is sealed first.
        idle_s: Seconds without work after which all open shards are sealed.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        *,
        shard_bytes: int = 1 << 30,
        open_shards: int = 64,
        idle_s: float = 30,
    ) -> None:
        self._root = root
        self._catalogue = catalogue
        self._shard_bytes = shard_bytes
        self._open_shards = open_shards
        self._idle_s = idle_s
        self._open: OrderedDict[bytes, Shard] = OrderedDict()  # by schema, idle the longest first
        self._retired: list[Shard] = []  # full, idle or broken: closed at the end of the round
        self._appended: set[tuple[str, str]] = set()  # session and run ids of this round
        prefix = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        self._names = (f"{prefix}-{number:06}.arrow" for number in count(1))
        self._closing = threading.Lock()
        self._closed = False
        self._queue: SimpleQueue[_Write | _Delete | None] = SimpleQueue()
        for trash in root.glob(f"{_TRASH}*"):
            shutil.rmtree(trash, ignore_errors=True)  # a deletion that a crash cut short
        self._thread = threading.Thread(target=self._loop, name="activation-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, run: RunFacts, batches: Sequence[pa.RecordBatch]) -> Future[StoredRun]:
        """Queue one run, whose batches share one schema; answered when it is on disk.

        Raises:
            StoreError: At once if the batches are not this session's or the writer is closed; from the
                future if the disk refused.
        """
        if not batches:
            raise StoreError(f"Run {run.run_id} has no rows: capture at least one token")
        schema = batches[0].schema
        try:
            check_session_id(run.session_id)
            shard = shard_facts(schema)
        except ValueError as error:
            raise StoreError(str(error)) from error
        if shard.session_id != run.session_id or shard.model != run.model:
            raise StoreError(f"Run {run.run_id} and its batches are not of one session and model")
        if not all(batch.schema.equals(schema, check_metadata=True) for batch in batches):
            raise StoreError(f"Run {run.run_id}: its batches differ in points, shapes or dtypes")
        future: Future[StoredRun] = Future()
        self._put(_Write(run, list(batches), batch_metadata(run, len(batches)), future))
        return future

    def delete(self, session_id: str) -> Future[bool]:
        """Queue a deletion: true when the session's files are gone, false if there was none.

        Raises:
            StoreError: At once if `session_id` can name none or the writer is closed; from the future if
                the disk refused.
        """
        try:
            check_session_id(session_id)
        except ValueError as error:
            raise StoreError(str(error)) from error
        future: Future[bool] = Future()
        self._put(_Delete(session_id, future))
        return future

    def close(self) -> None:
        """Finish what is queued, seal what is open, end the thread. May be called twice."""
        with self._closing:
            if not self._closed:
                self._queue.put(None)
            self._closed = True
        self._thread.join()

    def _put(self, item: _Write | _Delete) -> None:
        with self._closing:  # nothing is queued behind the end
            if self._closed:
                raise StoreError("The activation store is shutting down: send the request again")
            self._queue.put(item)

    def _loop(self) -> None:
        while self._round():
            pass
        self._seal_all()

    def _seal_all(self) -> None:
        self._retired += self._open.values()
        self._open.clear()
        self._close_retired()

    def _round(self) -> bool:
        """Serve all that waits; false once the end was among it. Keeps no batch alive afterwards."""
        try:
            items = [self._queue.get(timeout=self._idle_s if self._open else None)]
        except Empty:
            self._seal_all()
            return True
        while not self._queue.empty():  # this thread alone takes from it
            items.append(self._queue.get())
        wanted = [item for item in items if item and item.future.set_running_or_notify_cancel()]
        touched: dict[Shard, list[tuple[_Write, Entry]]] = {}
        for item in wanted:
            if isinstance(item, _Write):
                self._append(item, touched)
        for shard, written in touched.items():
            self._commit(shard, written)
        while len(self._open) > self._open_shards:
            self._retired.append(self._open.popitem(last=False)[1])
        self._close_retired()
        self._appended.clear()
        for item in wanted:
            if isinstance(item, _Delete):
                self._delete(item)
        return None not in items

    def _append(self, item: _Write, touched: dict[Shard, list[tuple[_Write, Entry]]]) -> None:
        run = item.run
        name = (run.session_id, run.run_id)
        if name in self._appended or self._catalogue.holds(*name):
            item.future.set_exception(StoreError(f"Run {run.run_id} is stored already: give it another id"))
            return
        schema = item.batches[0].schema
        key = schema.serialize().to_pybytes()
        try:
            if key not in self._open:
                self._open[key] = Shard(self._root, run.session_id, next(self._names), schema)
            shard = self._open[key]
            self._open.move_to_end(key)
            entry = shard.append(run, item.batches, item.metadata)
            touched.setdefault(shard, []).append((item, entry))
            self._appended.add(name)
        except (OSError, pa.ArrowException) as error:
            item.future.set_exception(self._explain(error))
        if key in self._open and (self._open[key].broken or self._open[key].length >= self._shard_bytes):
            self._retired.append(self._open.pop(key))

    def _commit(self, shard: Shard, written: list[tuple[_Write, Entry]]) -> None:
        try:
            shard.sync()
        except OSError as error:
            for item, _ in written:
                item.future.set_exception(self._explain(error))
            self._retire(shard)
            return
        self._catalogue.add(shard.session_id, [entry for _, entry in written], shard.facts())
        for item, entry in written:
            item.future.set_result(entry.stored())

    def _retire(self, shard: Shard) -> None:
        for key, other in list(self._open.items()):
            if other is shard:
                self._retired.append(self._open.pop(key))

    def _close_retired(self) -> None:
        for shard in self._retired:
            shard.close()
            if shard.rows:
                self._catalogue.add(shard.session_id, [], shard.facts())
        self._retired.clear()

    def _delete(self, item: _Delete) -> None:
        folder = self._root / item.session_id
        try:
            for shard in [shard for shard in self._open.values() if shard.session_id == item.session_id]:
                self._retire(shard)
            self._close_retired()
            on_disk = folder.is_dir() and not folder.is_symlink()
            trash = self._root / f"{_TRASH}{secrets.token_hex(8)}"
            if on_disk:
                # Renamed first, so that a crash on the way leaves no half of a session behind.
                folder.rename(trash)
            known = self._catalogue.drop(item.session_id)
            if on_disk:
                with directory(self._root) as top:
                    os.fsync(top)
                shutil.rmtree(trash)
            item.future.set_result(on_disk or known)
        except OSError as error:
            item.future.set_exception(self._explain(error))

    def _explain(self, error: Exception) -> StoreError:
        advice = _ADVICE.get(
            getattr(error, "errno", None) or 0,
            "see that the disk can be written, then send the request again",
        )
        return StoreError(f"The activation store at {self._root} failed ({error}): {advice}.")
