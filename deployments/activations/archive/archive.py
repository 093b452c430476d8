"""The archive: copies sealed segments to a bucket while the store writes, and lists them in the bucket's manifest.

The manifest lists a segment only once its object is complete, with the same bytes as on disk. After a crash between the
two, the segment is uploaded again. Segments in the bucket stay on the disk as a cache.

A deletion is final once it is in the state's database, with the names of the session's segments, which are never used
again. The writer's thread so deletes sessions without a request to the bucket. The archive's thread writes the deletion
to the manifest, and then removes the objects. What a crash leaves in between, the next start finishes.

More than 300 lines, because all that the thread does depends on the same claim and catalogue.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from deployments.activations.archive.cache import Cache
from deployments.activations.archive.claim import BucketClaim, InUseError
from deployments.activations.archive.uploads import QUEUED, Pauses, Uploads
from deployments.activations.catalogue.buckets import ARCHIVE, archived_to
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.database import NAME
from deployments.activations.catalogue.manifest import Line, Manifest, is_snapshot, remove_all, upload
from deployments.activations.catalogue.replaying import (
    deletion,
    has_caught_up,
    record,
    replay,
    restored,
    segment_lines,
    write_snapshot,
)
from deployments.activations.facts import StoredFile, name_of
from deployments.activations.files.disk import scan_session, write
from deployments.activations.files.places import File, Place, path_of
from deployments.activations.files.sqlite import transaction
from deployments.activations.state.nodes import node_of, uri_of
from deployments.activations.state.owners import Owners, Record
from deployments.activations.state.state import Pins, State

LOOK_S = 1.0  # between two looks for segments to upload
REMOVED = 1000  # objects that are removed between two looks
MANY_PARTS = 256  # parts of the manifest, from which on they may become a snapshot
MOST_PARTS = 1024  # of the manifest, at which they do in any case

logger = logging.getLogger(__name__)


class ArchiveError(OSError):
    """The bucket cannot be written now; the message has the reason."""


class Archive:
    """What goes to one bucket and comes from there. Safe to use from several threads.

    `name` tells this server from others, also when it starts again; `cache_bytes` of segments stay on the disk at most
    though they are in the bucket. Raises InUseError if another server archives there, ValueError if the directory
    archives elsewhere, OSError if the bucket refuses a directory that was never archived.
    """

    def __init__(self, root: Path, place: Place, name: str, cache_bytes: int) -> None:
        if place.uri.startswith("file:"):
            raise ValueError("archive names a bucket, and file: is none: such as s3://bucket/prefix?region=us-east-1")
        self.place, self._cache_bytes, self._root = place, cache_bytes, root
        self.manifest = Manifest(place, name, root)
        self._claim = BucketClaim(place, name)
        self._connected: int | None = None  # how often the catalogue was remade before it learned what the bucket has
        self._stopped: str | None = None  # why nothing is archived any more
        self._listing = threading.Lock()  # a deletion, or the choice of what is listed; never during a request
        self._wake, self._ending = threading.Event(), False
        self._copied: object = None  # the state's version that was copied
        self._pauses = Pauses()  # of segments, and of the methods that the thread calls
        self._uploads = Uploads(self._upload, self._wake.set, self._pauses)
        known = check_bucket(root, place)
        try:
            self._claim.acquire()
        except OSError as error:
            if not known:
                raise
            self._failed("_connect", error)  # it goes on without
        if not known:
            write(root, ".", ARCHIVE, f"{place.id} {place}".encode())
        self._claim.begin(self._lost)  # now: looking through a large directory takes longer than a claim holds

    # ---- what the store calls

    def begin(self, catalogue: Catalogue, owners: Owners, elsewhere: Any = None) -> None:
        """Archive what is sealed from now on; `elsewhere`, a `NodePlace`, uploads and removes what other nodes have."""
        self._catalogue, self._owners, self._elsewhere = catalogue, owners, elsewhere
        self.cache = Cache(self._root, self.manifest, catalogue, elsewhere, self._cache_bytes)
        self._pins = Pins(self._root)
        self._copies_of = Owners(self._root, read_only=True)  # apart: the writer's wait for no copying
        self._state = State(self._root)
        self._restore_new_state()  # before anything is too old
        if lines := self._waiting().values():  # perhaps they were killed before the files were gone
            catalogue.change((), lambda database: replay(database, None, lines, self.manifest))
            catalogue.look()
        if self._claim.is_held:
            try:
                self._connect()
            except OSError as error:
                self._failed("_connect", error)
        self._thread = threading.Thread(target=self._loop, name="archive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; what is not uploaded yet is, when the store starts again."""
        self._ending = True
        self._wake.set()
        self._thread.join()
        self._claim.close()

    def retry(self) -> None:
        """Try at once what failed before: a node came back."""
        self._pauses.clear()
        self._wake.set()

    def has(self, file: StoredFile) -> bool:
        """Whether a node's segment is in the bucket, and then listed on its node, or was before it was deleted."""
        name = name_of(file.uri)
        if self._catalogue.select("SELECT 1 FROM deleted WHERE segment = ?", name):
            return True
        found = self._catalogue.select(
            "SELECT bytes FROM files WHERE uri = ? AND archived", self.manifest.bucket + name
        )
        if found and found[0][0] == file.bytes:
            self.cache.move(self.manifest.bucket + name, file.uri)
        return bool(found)

    def check_deletes(self) -> None:
        """Raise ArchiveError if the bucket is another server's now, or the catalogue never learned what is in it."""
        if self._stopped or not self._catalogue.change((), has_caught_up):
            raise ArchiveError(f"what {self.place} has cannot be deleted now: {self.trouble}")

    def delete(self, session_id: str) -> bool:
        """Forget a session for good, without a request to the bucket; whether there was one."""
        with self._listing:
            files = self._catalogue.select("SELECT uri, archived FROM files WHERE session = ?", session_id)
            whole = set(self._uploads.whole())
            # What is on a node alone is in no bucket, and stays there if the node has a later run.
            uris = [uri for uri, archived in files if archived or uri in whole or not node_of(uri)]
            segments = {name_of(uri) for uri in (*uris, *(seen.uri for seen in scan_session(self._root, session_id)))}
            line = deletion(session_id, segments)
            if segments:
                self._state.write("INSERT INTO bucket_deletions (line) VALUES (?)", [(json.dumps(line),)])
            known = self._catalogue.drop(session_id)
            self._catalogue.change((), lambda database: replay(database, None, [line], self.manifest))
        self._wake.set()
        return known or bool(segments)

    # ---- the manager's thread

    def _loop(self) -> None:
        while not self._ending:
            self._attempt(self._connect)
            if self._is_connected:
                for work in (self._list_uploaded, self._begin_uploads, self._finish_deletions, self._copy_records):
                    self._attempt(work)
                self._attempt(self._merge)
                self._attempt(self.cache.evict)
            self._wake.wait(LOOK_S)
            self._wake.clear()
        self._uploads.close()
        self._attempt(self._list_uploaded)

    def _attempt(self, work: Callable[[], object]) -> None:
        """Do a part of the thread's work, and after an error once more, after a pause; the other parts go on."""
        name = work.__name__
        if name in self._pauses:
            return
        try:
            work()
            self._pauses.end(name)
        except OSError as error:
            self._failed(name, error)
        except Exception as error:  # nothing is above this thread, and uploads must go on after any error
            logger.exception("archiving to %s failed; retrying later", self.place)
            self._pauses.begin(name, error)

    def _connect(self) -> None:
        """Claim the bucket, and learn what the manifest says, unless that is done."""
        if self._stopped or self._is_connected:
            return
        if not self._claim.is_held:
            try:
                self._claim.acquire()
            except InUseError as error:
                self._stopped = str(error)
                self._lost()
                return
        remade = self._catalogue.remade
        if self._catalogue.catch_up():
            self._restore_records()
            self._catalogue.change((), restored)
        self._connected = remade
        self._pauses.clear()

    def _begin_uploads(self) -> None:
        found = """SELECT uri, bytes FROM files WHERE sealed AND NOT archived AND rows IS NOT 0 AND uri LIKE ? || '%'
            ORDER BY id LIMIT ?"""
        for base in ("file:", *(uri_of(node, "") for node in (self._elsewhere.known() if self._elsewhere else ()))):
            self._uploads.begin(self._catalogue.select(found, base, QUEUED + len(self._pauses)))

    def _upload(self, uri: str, size: int) -> None:
        if node_of(uri):
            self._elsewhere.upload(uri, size)
        elif self._catalogue.select("SELECT 1 FROM files WHERE uri = ?", self.manifest.bucket + name_of(uri)):
            raise OSError(f"the bucket has another file named as {uri}: the next start takes it in under another name")
        else:
            upload_sealed(path_of(uri), size, self._object(name_of(uri)))

    def _list_uploaded(self) -> None:
        """Add segments that are in the bucket to the manifest, except those whose session was deleted meanwhile."""
        for uri, error in self._uploads.failed():
            logger.warning("%s is not archived yet: %s", uri, error)
        if not (uris := self._uploads.whole()):
            return
        with self._listing:  # who deletes the session from now on finds them among the uploads that are whole
            lines = self._catalogue.change((), lambda database: segment_lines(database, uris))
        if lines:
            self._write(lines.values(), {uri.rsplit("/", 2)[-2] for uri in lines})
            self._uploads.forget(lines)
            self.cache.grown = True
        # A file that is known by another URI was listed before, though an error then came between.
        gone = [uri for uri in uris if uri not in lines and not self._knows(name_of(uri))]
        self._check()
        remove_all([self._object(name_of(uri)) for uri in gone])
        self._uploads.forget(uris)

    def _finish_deletions(self) -> None:
        """Write deletions to the manifest, and remove objects whose deletion is in it."""
        pending = self._catalogue.select("SELECT segment FROM deleted WHERE pending LIMIT ?", REMOVED)
        begun = {name_of(uri) for uri in self._uploads.begun}  # whose objects may be yet to come
        pending = [(segment,) for (segment,) in pending if segment not in begun]
        if waiting := self._waiting():  # looked for after `pending`: these are in the manifest afterwards
            self._write(waiting.values())
            self._state.write("DELETE FROM bucket_deletions WHERE id = ?", [(number,) for number in waiting])
        if pending:
            segments = defaultdict(list)
            for (segment,) in pending:
                segments[segment.rpartition("/")[0]].append(segment)
            self._check()
            remove_all([self._object(segment) for (segment,) in pending])
            self._write(deletion(session_id, gone, done=True) for session_id, gone in segments.items())
        if waiting or pending:
            self._wake.set()  # there may be more

    def _waiting(self) -> dict[int, Line]:
        """The lines of deletions that are yet to be written to the manifest, by their numbers in the state."""
        return {id: json.loads(line) for id, line in self._state.rows("SELECT id, line FROM bucket_deletions")}

    def _knows(self, segment: str) -> bool:
        """Whether a segment, by its name, is in the catalogue, wherever it is."""
        found = "SELECT uri FROM files WHERE session = ?"
        session_id = unquote(segment.partition("/")[0])
        return any(name_of(uri) == segment for (uri,) in self._catalogue.select(found, session_id))

    def _copy_records(self) -> None:
        """Copy pins and owners to the manifest where they changed."""
        self._restore_new_state()
        version = self._copies_of.version()
        if version == self._copied:
            return
        owners = {name: dict(one._asdict()) for name, one in self._copies_of.all().items()}
        now = {("pin", name): True for name in self._pins.names()} | {("owner", name): owners[name] for name in owners}
        known = self._records()
        changed: dict[tuple[str, str], Any] = dict.fromkeys(known.keys() - now.keys())
        changed |= {name: value for name, value in now.items() if known.get(name) != value}
        [[last]] = self._catalogue.select("SELECT coalesce(max(at), 0) FROM records")
        lines = [record(*name, value, last) for name, value in changed.items()]
        if lines:
            self._write(lines)
        self._copied = version

    def _restore_new_state(self) -> None:
        """Restore pins and owners from the catalogue's copies into a state database that replaced a lost one."""
        if self._state.rows("SELECT 1 FROM unrestored"):
            self._restore_records()
            self._state.write("DELETE FROM unrestored", [()])

    def _restore_records(self) -> None:
        """Write down the pins and owners that the manifest has and this disk has not: they outlive a head."""
        records = self._records()
        self._pins.add(name for kind, name in records if kind == "pin")
        self._owners.add({name: Record(**value) for (kind, name), value in records.items() if kind == "owner"})

    def _records(self) -> Mapping[tuple[str, str], Any]:
        found = self._catalogue.select("SELECT kind, session, value FROM records WHERE value IS NOT NULL")
        return {(kind, session_id): json.loads(value) for kind, session_id, value in found}

    def _merge(self) -> None:
        """Have one snapshot stand for the parts of the manifest, where there are many."""
        applied = self._catalogue.select("SELECT name FROM applied")
        if len(applied) < MANY_PARTS:
            return
        names = self.manifest.names()
        parts = sum(size for name, size in names.items() if not is_snapshot(name))
        if len(names) < MANY_PARTS or (4 * parts < sum(names.values()) and len(names) < MOST_PARTS):
            return
        with tempfile.TemporaryDirectory(prefix=".new-", dir=self._root) as folder:
            made = Path(folder, "snapshot")
            merged = write_snapshot(self._root / NAME, made)
            self._check()
            snapshot = self.manifest.put_snapshot(made)

        def take(database: sqlite3.Connection) -> None:
            with transaction(database):
                database.execute("INSERT OR IGNORE INTO applied VALUES (?)", (snapshot,))
                database.executemany("DELETE FROM applied WHERE name = ?", [(name,) for name in merged])

        self._catalogue.change((), take)
        self._check()
        self.manifest.remove(merged & names.keys())

    # ----

    def _write(self, lines: Iterable[Line], session_ids: Collection[str] = ()) -> None:
        """Add a part to the manifest, and bring it into the catalogue."""
        self._check()
        told = list(lines)
        part = self.manifest.write(told)
        self._catalogue.change(session_ids, lambda database: replay(database, part, told, self.manifest))

    @property
    def trouble(self) -> str:
        """Why the bucket is not written, or not as fast as was waited for."""
        if said := self._stopped or self._pauses.why:
            return said
        if not self._claim.is_held:
            return "the claim to it was not renewed"
        is_read = self._connected is not None and self._is_connected
        return "uploads take longer" if is_read else "the list of what it has is not read yet"

    @property
    def _is_connected(self) -> bool:
        """Whether the bucket is this server's, and the catalogue knows what is in it."""
        return self._connected == self._catalogue.remade and self._claim.is_held

    def _check(self) -> None:
        """Raise ArchiveError unless the bucket may be changed."""
        if self._stopped or not self._is_connected:
            raise ArchiveError(f"the bucket {self.place} cannot be written now: {self.trouble}")

    def _lost(self) -> None:
        if self._stopped:
            logger.error("NOTHING IS ARCHIVED any more: %s", self._stopped)
        else:
            logger.error("nothing is archived to %s for now, its claim ran out: %s", self.place, self.trouble)

    def _failed(self, work: str, error: OSError) -> None:
        self._pauses.begin(work, error)
        logger.error("archiving to %s failed, and is retried: %s", self.place, error)

    def _object(self, segment: str) -> Any:
        return self.place.file(unquote(segment))


def check_bucket(root: Path, place: Place | None) -> bool:
    """Whether a directory was archived to this bucket before; ValueError if it was to another one."""
    if (before := archived_to(root)) is None:
        return False
    id, uri = before
    if place is None or id != place.id:
        raise ValueError(
            f"{root} is archived to {uri}, and some of its runs may exist only there: set archive={uri} with its "
            f"settings; to do without them, remove {root / ARCHIVE} and {root / NAME}"
        )
    return True


def upload_sealed(path: Path, size: int, file: File) -> None:
    """Upload a segment that was sealed with `size` bytes; OSError if it has others, or as `upload`."""
    if (found := path.stat().st_size) != size:
        raise OSError(f"{path} has {found} bytes, and was sealed with {size}")
    with path.open("rb") as data:
        upload(data, file)
