"""Object storage: a bucket, or a directory of one, and the thread that copies a store's sealed files to it."""

from __future__ import annotations

import contextlib
import json
import logging
import posixpath
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from deployments.activations.facts import public_uri
from deployments.activations.index.index import Index
from deployments.uris import check_uri

_PIECE = 8 << 20  # bytes that are copied at a time
_UPLOADS = 8  # files that are uploaded at a time
_LOOK_S = 1.0  # between two looks for files
_PAUSES_S = (1.0, 300.0)  # after a failure, doubled each time
ATTEMPTS = 5  # of each request to S3, with growing pauses

logger = logging.getLogger(__name__)


class Bucket:
    """A directory of a file system, `path` there; `uri` names it without settings and without a slash at its end.

    Files are named by their paths below it. Every method raises OSError where the storage refuses.
    """

    def __init__(self, fs: Any, path: str, uri: str) -> None:
        self.fs, self.path, self.uri = fs, path, uri

    def __repr__(self) -> str:
        return self.uri

    def uri_of(self, name: str) -> str:
        """The URI of a file."""
        return f"{self.uri}/{quote(name)}"

    def list(self, prefix: str = "") -> dict[str, int]:
        """The names of all files below a directory, and their sizes in bytes."""
        selector = pafs.FileSelector(self._at(prefix), allow_not_found=True, recursive=True)
        files = (info for info in self.fs.get_file_info(selector) if info.type == pafs.FileType.File)
        return {posixpath.relpath(info.path, self.path or "/"): int(info.size) for info in files}

    def size(self, name: str) -> int | None:
        """The length of a file in bytes; None if there is none."""
        info = self.fs.get_file_info(self._at(name))
        return int(info.size) if info.type == pafs.FileType.File else None

    def fetch(self, name: str, to: Path) -> None:
        """Copy a file to the disk."""
        with self.fs.open_input_stream(self._at(name)) as data, to.open("wb") as out:
            shutil.copyfileobj(data, out, _PIECE)

    def put(self, name: str, path: Path) -> None:
        """Copy a file from the disk, in place of an older one; it is durable when this returns."""
        if not isinstance(self.fs, pafs.S3FileSystem):  # whose directories are parts of names
            self.fs.create_dir(posixpath.dirname(self._at(name)), recursive=True)
        try:
            with path.open("rb") as data, self.fs.open_output_stream(self._at(name)) as out:
                shutil.copyfileobj(data, out, _PIECE)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(name)  # which may have a part of it
            raise

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.delete_file(self._at(name))

    def _at(self, name: str) -> str:
        return posixpath.join(self.path, name) if name else self.path


def bucket(uri: str) -> Bucket:
    """The directory that a URI names, opened with the settings in its query.

    `s3://bucket/prefix?region=...&endpoint_override=host:port&scheme=http` and other schemes of `pyarrow.fs`; those
    that it lacks are fsspec's. ValueError if no file system has such URIs, its package is not installed, or the URI may
    contain a key.
    """
    url, public = urlsplit(check_uri(uri)), public_uri(uri)
    settings: dict[str, Any] = {
        name: {"true": True, "false": False}.get(value, value) for name, value in parse_qsl(url.query)
    }
    try:
        if url.scheme == "s3":
            path = f"{url.hostname}{unquote(url.path)}"
            retry = pafs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS)
            # Writers wait for the network, so that memory stays bounded; a small object is one request.
            settings |= {"background_writes": False, "allow_delayed_open": True, "retry_strategy": retry}
            fs = pafs.S3FileSystem(**settings)
        elif url.scheme in ("file", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs"):
            fs, path = pafs.FileSystem.from_uri(uri)
        else:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            other, path = url_to_fs(public, **settings)
            fs = pafs.PyFileSystem(pafs.FSSpecHandler(other))
    except (ImportError, pa.ArrowException, TypeError, ValueError) as error:
        advice = "install its package with pip" if isinstance(error, ImportError) else "S3's are s3://bucket/prefix"
        raise ValueError(f"{public} cannot be a store: {error}; {advice}") from None
    return Bucket(fs, path.rstrip("/"), public)


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
        failed = [(path, error) for path, job in done if (error := job.exception())]
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
