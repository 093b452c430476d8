"""Copies sealed files to a bucket, and removes from the disk the oldest that the bucket has."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deployments.activations.files.buckets import Bucket
from deployments.activations.index.index import Index

_UPLOADS = 8  # files that are uploaded at a time
_LOOK_S = 1.0  # between two looks for files
_PAUSES_S = (1.0, 300.0)  # after a failure, doubled each time

logger = logging.getLogger(__name__)


class Uploader:
    """A thread that keeps a bucket up to date with a store; what it has done stands in the index.

    Nothing waits for it. What the bucket refuses is tried again after growing pauses.

    Args:
        root: The store's directory.
        index: Its index, which says which files are sealed and archived.
        bucket: Where they go, each by its path below `root`.
        cache_bytes: How many bytes of archived files stay on the disk; the oldest go first.
    """

    def __init__(self, root: Path, index: Index, bucket: Bucket, cache_bytes: int) -> None:
        self._root, self._index, self._bucket, self._cache_bytes = root, index, bucket, cache_bytes
        self._failed = dict[str, tuple[float, float]]()  # paths, until when they wait, and for how long the next time
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="archive")
        self._thread = threading.Thread(target=self._loop, name="archive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after the uploads that have started."""
        self._ended.set()
        self._thread.join()
        self._pool.shutdown()

    def _loop(self) -> None:
        while not self._ended.is_set():
            try:
                is_busy = self._turn()
            except Exception:  # nothing is above this thread, and the next turn tries again
                logger.exception("the archive %s waits", self._bucket)
                is_busy = False
            self._ended.wait(0.0 if is_busy else _LOOK_S)

    def _turn(self) -> bool:
        """Remove, upload and make room; whether there may be more to do at once."""
        now = time.monotonic()
        waits = json.dumps([path for path, (until, _) in self._failed.items() if until > now])
        rest = f"path NOT IN (SELECT value FROM json_each(?)) LIMIT {8 * _UPLOADS}"
        removed = self._each(f"SELECT path FROM removals WHERE {rest}", waits, self._remove)
        which = f"SELECT path FROM files WHERE sealed AND local AND NOT archived AND rows IS NOT 0 AND {rest}"
        uploaded = self._each(which, waits, self._upload)
        self._make_room()
        return removed or uploaded

    def _each(self, which: str, waits: str, work: Callable[[str], None]) -> bool:
        """Do something with each path that a statement selects; whether any of it was done."""
        done = [(path, self._pool.submit(work, path)) for (path,) in self._index.select(which, waits)]
        failed = [(path, error) for path, one in done if (error := one.exception())]
        for path, error in failed:
            _, pause = self._failed.get(path, (0.0, _PAUSES_S[0]))
            self._failed[path] = time.monotonic() + pause, min(2 * pause, _PAUSES_S[1])
            logger.error("%s waits for the archive %s: %s", path, self._bucket, error)
        for path in {path for path, _ in done} - {path for path, _ in failed}:
            self._failed.pop(path, None)
        return len(failed) < len(done)

    def _upload(self, path: str) -> None:
        if self._ended.is_set():
            return
        try:
            size = (self._root / path).stat().st_size
            if self._bucket.size(path) != size:  # else an earlier index knew of it
                self._bucket.put(path, self._root / path)
        except FileNotFoundError:
            if not (self._root / path).exists():
                self._index.forget([path])
                return
            raise  # it is the bucket that is not there
        self._index.change("UPDATE files SET archived = 1 WHERE path = ?", (path,))
        if not self._index.select("SELECT 1 FROM files WHERE path = ?", path):  # it was deleted meanwhile
            self._index.change("INSERT OR IGNORE INTO removals VALUES (?)", (path,))

    def _remove(self, path: str) -> None:
        self._bucket.remove(path)
        self._index.change("DELETE FROM removals WHERE path = ?", (path,))

    def _make_room(self) -> None:
        """Remove the oldest archived files from the disk, above `cache_bytes`."""
        [(total,)] = self._index.select("SELECT coalesce(sum(bytes), 0) FROM files WHERE local AND archived")
        over = total - self._cache_bytes
        if over <= 0:
            return
        oldest = "SELECT path, bytes FROM files WHERE local AND archived ORDER BY modified_ns, id LIMIT 1000"
        for path, size in self._index.select(oldest):
            if over <= 0:
                return
            self._index.change("UPDATE files SET local = 0 WHERE path = ?", (path,))
            (self._root / path).unlink(missing_ok=True)
            over -= size
