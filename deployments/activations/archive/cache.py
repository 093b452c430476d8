"""Segments that are in the bucket and stay on disks all the same, as a cache of it."""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.manifest import Manifest
from deployments.activations.catalogue.updates import move
from deployments.activations.facts import name_of
from deployments.activations.files.locks import NEW
from deployments.activations.state.nodes import node_of

_FETCHES = 8  # segments that are fetched beside each other


class Elsewhere(Protocol):
    """What other nodes do with segments on their own disks; raises OSError where a node is away or cannot do it."""

    def is_alive(self, node: str) -> bool:
        """Whether a node, by its key, can be asked."""

    def upload(self, uri: str, size: int) -> None:
        """Upload a segment of this many bytes from its node."""

    def remove(self, uri: str) -> None:
        """Remove a segment from its node's disk."""


class Cache:
    """The disks' segments that are in the bucket.

    Args:
        root: The store's directory, absolute and no link.
        manifest: The bucket's.
        catalogue: The store's.
        elsewhere: Removes segments that lie on other nodes.
        most: The most bytes of each disk.
    """

    def __init__(
        self, root: Path, manifest: Manifest, catalogue: Catalogue, elsewhere: Elsewhere | None, most: int
    ) -> None:
        self._root = root
        self._place = manifest.place
        self._bucket = manifest.bases.bucket
        self._catalogue = catalogue
        self._elsewhere = elsewhere
        self._most = most
        self._grown = True  # since the last `evict`

    def grow(self) -> None:
        """More segments of the disks are in the bucket."""
        self._grown = True

    def evict(self) -> None:
        """Remove from each disk what is in the bucket, the oldest first, until there is no more than there may be.

        Raises:
            OSError: A disk refuses, or its node is away.
        """
        if not self._grown:
            return
        self._grown = False
        by_node = defaultdict[str | None, list[tuple[str, int]]](list)
        kept = "SELECT uri, bytes FROM files WHERE archived AND uri NOT LIKE ? || '%' ORDER BY modified_ns, id"
        for uri, size in select(self._catalogue, kept, self._bucket):
            by_node[node_of(uri)].append((uri, size))
        for node, files in by_node.items():
            over = sum(size for _, size in files) - self._most
            for uri, size in files:
                if over <= 0:
                    break
                over -= size
                self._remove(node, uri)

    def restore(self, uris: Iterable[str]) -> bool:
        """Fetch segments to the disk that are in the bucket alone, if there is room for all; whether it did.

        Raises:
            OSError: The bucket or the disk refuses; those that came are kept.
        """
        gone = {uri for uri in uris if uri.startswith(self._bucket)}
        asked = "SELECT bytes FROM files WHERE uri = ?"
        if not gone or sum(size for uri in gone for (size,) in select(self._catalogue, asked, uri)) > self._most:
            return False
        with ThreadPoolExecutor(_FETCHES) as pool:
            list(pool.map(self._restore, gone))
        self.grow()
        return True

    def move(self, uri: str, to: str, modified_ns: int = 0) -> bool:
        """Have a segment that is in the bucket be read at another URI; false where it is known no more."""
        session_id = uri.rsplit("/", 2)[-2]
        return self._catalogue.change([session_id], lambda database: move(database, uri, to, modified_ns))

    def _remove(self, node: str | None, uri: str) -> None:
        if node and not (self._elsewhere and self._elsewhere.is_alive(node)):
            return
        self.move(uri, self._bucket + name_of(uri))
        if node:
            assert self._elsewhere is not None
            self._elsewhere.remove(uri)
        else:
            path_of(uri).unlink(missing_ok=True)

    def _restore(self, uri: str) -> None:
        name = unquote(name_of(uri))
        path, file = self._root / name, self._place.file(name)
        path.parent.mkdir(exist_ok=True)
        unfinished = self._root / f"{NEW}{path.name}-{threading.get_ident()}"
        try:
            with file.fs.open_input_stream(file.path) as data, unfinished.open("wb") as out:
                shutil.copyfileobj(data, out, 16 << 20)
            found = unfinished.stat()
            if found.st_size != file.size:
                raise OSError(f"{file} came with {found.st_size} of {file.size} bytes")
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
        if not self.move(uri, path.as_uri(), found.st_mtime_ns):
            path.unlink()  # the session was deleted meanwhile


def select(catalogue: Catalogue, statement: str, *values: Any) -> list[Any]:
    """What a statement finds in the catalogue's database."""
    return catalogue.change((), lambda database: database.execute(statement, values).fetchall())


def path_of(uri: str) -> Path:
    """The path of a segment on the store's own disk."""
    return Path(unquote(urlsplit(uri).path))
