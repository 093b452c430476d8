"""The cache of a bucket: segments that were uploaded and stay on disks."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.manifest import Manifest
from deployments.activations.catalogue.rows import move
from deployments.activations.facts import StoreError, name_of
from deployments.activations.files.disk import NEW
from deployments.activations.files.places import path_of
from deployments.activations.state.nodes import node_of

_FETCHES = 8  # segments that are fetched at a time
_FREE = 20, 4 << 30  # a twentieth of the store's disk, and no more than so many bytes, are to be free


class Cache:
    """Segments on disks that are in the bucket too, so that they can be removed.

    Args:
        root: The store's directory.
        manifest: The bucket's.
        catalogue: The store's.
        elsewhere: The directories of other nodes.
        most: Bytes of such segments that stay on each disk, on the store's fewer where it is nearly full.
    """

    def __init__(self, root: Path, manifest: Manifest, catalogue: Catalogue, elsewhere: Any, most: int) -> None:
        self._root, self._catalogue, self._elsewhere, self._most = root, catalogue, elsewhere, most
        self._place, self._bucket = manifest.place, manifest.bucket
        self._restoring: dict[str, threading.Lock] = {}  # by URI
        self.grown = True  # since the last `evict`, more segments of the disks are in the bucket
        self._is_used = False  # whether any are on the store's disk

    def evict(self) -> None:
        """Remove from each disk what is in the bucket, the oldest first, until no more than `most` bytes stay.

        From the store's disk more goes, until enough of it is free. OSError or StoreError if a disk or a node refuses;
        other files go all the same. The next call tries again after any error.
        """
        if not self.grown and not (self._is_used and self._missing()):
            return
        self.grown = False
        try:
            self._evict()
        except Exception:  # any error: retry in the next call, then re-raise
            self.grown = True
            raise

    def _evict(self) -> None:
        failed: OSError | StoreError | None = None
        kept = """SELECT uri, bytes, coalesce(modified_ns, 0) FROM files WHERE archived AND uri NOT LIKE ? || '%'
            ORDER BY modified_ns, id"""
        files = self._catalogue.select(kept, self._bucket)
        over = Counter[str | None]()  # by node
        for uri, size, _ in files:
            over[node_of(uri)] += size
        most = min(self._most, over[None] - self._missing())
        for uri, size, modified_ns in files:
            if over[node := node_of(uri)] > (self._most if node else most) and self._is_there(node):
                try:
                    self._remove(node, uri, modified_ns)
                    over[node] -= size
                except (OSError, StoreError) as error:
                    failed = error
                    if node:  # it may take as long to refuse each
                        over[node] = 0
        self._is_used = over[None] > 0
        if failed:
            raise failed

    def restore(self, uris: Iterable[str]) -> bool:
        """Fetch segments that are in the bucket alone, if there is room for all; whether it did."""
        gone = {uri for uri in uris if uri.startswith(self._bucket)}
        asked = "SELECT bytes FROM files WHERE uri = ?"
        size = sum(size for uri in gone for (size,) in self._catalogue.select(asked, uri))
        if not gone or size > min(self._most, self._spare() // 2):  # other runs are stored meanwhile
            return False
        with ThreadPoolExecutor(_FETCHES) as pool:
            list(pool.map(self._restore_once, gone))
        self.grown = True
        return True

    def move(self, uri: str, to: str, modified_ns: int = 0) -> bool:
        """Let an archived segment be read at another URI; false if it is no longer known."""
        return self._catalogue.change((), lambda database: move(database, uri, to, modified_ns))

    def _is_there(self, node: str | None) -> bool:
        return node is None or bool(self._elsewhere and self._elsewhere.is_alive(node))

    def _remove(self, node: str | None, uri: str, modified_ns: int) -> None:
        archived = self._bucket + name_of(uri)
        try:
            self.move(uri, archived)
        except StoreError:
            if node or not self._missing():
                raise
            # The disk is full. After a crash in between, a file that is gone is read from the bucket, too.
            path_of(uri).unlink(missing_ok=True)
            self.move(uri, archived)
            return
        try:
            if node:
                self._elsewhere.remove(uri)
            else:
                path_of(uri).unlink(missing_ok=True)
        except OSError:
            self.move(archived, uri, modified_ns)
            raise

    def _spare(self) -> int:
        """Bytes on the store's disk beyond those that are to stay free; below 0 where too few are free."""
        disk = os.statvfs(self._root)
        part, most = _FREE
        return disk.f_bavail * disk.f_frsize - min(disk.f_blocks * disk.f_frsize // part, most)

    def _missing(self) -> int:
        """Bytes that are to become free on the store's disk."""
        return max(0, -self._spare())

    def _restore_once(self, uri: str) -> None:
        with self._restoring.setdefault(uri, threading.Lock()):
            if self._catalogue.select("SELECT 1 FROM files WHERE uri = ?", uri):  # else another call has fetched it
                self._restore(uri)

    def _restore(self, uri: str) -> None:
        name = unquote(name_of(uri))
        path, file = self._root / name, self._place.file(name)
        path.parent.mkdir(exist_ok=True)
        unfinished = self._root / f"{NEW}{path.name}-{threading.get_ident()}"
        try:
            file.fetch(unfinished)
            found = unfinished.stat()
            if found.st_size != file.size:
                raise OSError(f"{file} came with {found.st_size} of {file.size} bytes")
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
        if not self.move(uri, path.as_uri(), found.st_mtime_ns):
            path.unlink()  # the session was deleted meanwhile
