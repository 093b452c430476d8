"""Small objects of a session become one: object storage cannot append, so each commit made one of its own.

The one is made in memory, of all that the small ones hold. A mark beside it names them before it is put there; from
when it is there they count no more. They go when it has been there for a while, so that who reads them can finish, and
only if it is still what was made; a run's URI leads to it then.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count

import pyarrow as pa
from xxhash import xxh3_128_hexdigest

from deployments.activations import checksums, marks
from deployments.activations.catalogue import Catalogue
from deployments.activations.deleting import finish_deletion, remove_all
from deployments.activations.entries import Entry, StoredFile
from deployments.activations.holding import DELETED, NEW
from deployments.activations.marks import ARROW, JOINED, Mark
from deployments.activations.objects import HeldFile, ObjectFile, Place
from deployments.activations.reader import DamagedError, whole_runs, within
from deployments.activations.schema import PHASES, batch_facts, kind_of, point_types
from deployments.activations.verifying import changed

SMALL = 16 << 20  # bytes: larger objects are left as they are
MANY = 32  # small objects of one kind, from which on they become one
LARGE = 64 << 20  # bytes of small objects that become one, at the most; they are in memory meanwhile
READERS_S = 3600.0  # that readers of the small ones have to finish
_EVERY_S = 60.0  # between two looks for small objects
_TIDY_S = 3600.0  # between two looks through all of the bucket
_AGAIN_S = 3600.0  # after which what is damaged is looked at again

logger = logging.getLogger(__name__)

_Batch = tuple[pa.RecordBatch, Mapping[bytes, bytes]]


class Compactor:
    """Keeps a bucket in order, on a thread of its own: one for each store, beside its writer.

    It makes one of many small objects, removes what became one, and goes on with deletions that were cut short.

    Args:
        root: The store's.
        catalogue: The store's.
        alone: Held while a session is taken away, and while an object is put beside others of a session.
    """

    def __init__(self, root: Place, catalogue: Catalogue, alone: threading.Lock) -> None:
        self._root = root
        self._catalogue = catalogue
        self._alone = alone
        self._left: dict[str, float] = {}  # objects that are damaged, and until when they are not looked at
        self._own, self._numbers = secrets.token_hex(4), count(1)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="activation-compactor", daemon=True)

    def start(self) -> None:
        """Look for small objects each minute, and through all of the bucket each hour."""
        self._thread.start()

    def stop(self) -> None:
        """End; what is under way may go on."""
        self._ending.set()

    def close(self) -> None:
        """End, and wait for what is under way."""
        self.stop()
        self._thread.join()

    def tidy(self, now: float | None = None) -> None:
        """Remove what is to go; what cannot go is logged, and keeps nothing else from going.

        Args:
            now: Unix seconds; by default those of the clock.

        Raises:
            OSError: The bucket cannot be listed.
        """
        now = time.time() if now is None else now
        for info in self._root.infos(deep=True):
            file = self._root.file(posixpath.relpath(info.path, self._root.path))
            with self._logged(file.uri):
                self._remove(file, now - info.mtime.timestamp())

    def join(self) -> None:
        """Make one of small objects wherever there are many; what cannot be joined is logged, and stays as it is."""
        self._left = {uri: until for uri, until in self._left.items() if until > time.monotonic()}
        for session_id, sizes in self._catalogue.small(SMALL, MANY):
            with self._logged(session_id):
                self._join_kind(session_id, sizes)

    def _loop(self) -> None:
        tidied = -_TIDY_S
        while not self._ending.wait(_EVERY_S):
            try:
                self.join()
                if time.monotonic() - tidied >= _TIDY_S:
                    tidied = time.monotonic()
                    self.tidy()
            except Exception:
                logger.exception("%s is looked through again later", self._root)

    @contextlib.contextmanager
    def _logged(self, what: str, uris: Sequence[str] = ()) -> Iterator[None]:
        """Log what goes wrong with one of many things; where no store refused, leave these objects as they are."""
        try:
            yield
        except (OSError, ValueError, pa.ArrowException) as error:
            logger.exception("%s stays as it is for now", what)
            if not isinstance(error, OSError):
                self._leave(uris)

    def _leave(self, uris: Iterable[str]) -> None:
        self._left |= dict.fromkeys(uris, time.monotonic() + _AGAIN_S)

    def _remove(self, file: ObjectFile, age: float) -> None:
        """Do what an object says that marks others, or remove it where a killed process left it."""
        beside = file.folder.path == self._root.path
        if beside and file.name.startswith(DELETED):
            finish_deletion(file)
        elif beside and file.name.startswith(NEW) and age > READERS_S:
            file.remove()
        elif not beside and file.name.endswith(JOINED) and age > READERS_S:
            self._sweep(file)

    def _sweep(self, file: ObjectFile) -> None:
        """Remove small objects that have become one, if that is there as it was made."""
        mark = marks.read(file)
        large = file.folder.file(file.name.removesuffix(JOINED) + ARROW)
        if not large.exists() or large.size != mark.bytes:
            large.remove()  # an upload was cut short, or the session is deleted: the small ones are all there is
        else:
            held = large.held()
            if xxh3_128_hexdigest(held.data) != mark.xxh3:
                raise DamagedError(f"{large} is not as it was written: the objects that it was made of stay")
            self._move(held, mark)
            remove_all(file.folder, mark.objects)
        file.remove()

    def _join_kind(self, session_id: str, sizes: Mapping[str, int]) -> None:
        left = {uri: size for uri, size in sizes.items() if uri not in self._left}
        if len(left) < MANY:
            return
        folder = self._root.below(session_id)
        going = {folder.file(name).uri for name in marks.joined(folder)}
        left = {uri: size for uri, size in left.items() if uri not in going}
        for uris in _of_a_size(left) if len(left) >= MANY else ():
            if len(uris) > 1 and not self._ending.is_set():
                with self._logged(f"what lies in {folder}", uris):
                    self._join(session_id, uris)

    def _join(self, session_id: str, uris: Sequence[str]) -> None:
        """Make one of small objects, and say where their runs are now.

        Raises:
            OSError: The store refuses.
            DamagedError: What was made is not what the catalogue says.
        """
        folder = self._root.below(session_id)
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{self._own}-{next(self._numbers):06}"
        file, said = folder.file(name + ARROW), folder.file(name + JOINED)
        small, data = self._build(session_id, uris)
        if len(small) < 2:
            return
        mark = Mark(list(small), bytes=len(data), xxh3=xxh3_128_hexdigest(data))
        large = HeldFile(file, data)
        if {run.facts.run_id: run.rows for run in whole_runs(large)} != _all(small.values()):
            raise DamagedError(f"what was made of {len(small)} objects does not hold their runs")
        with self._alone:  # a deletion takes all or nothing of it
            if not self._catalogue.has([folder.file(one).uri for one in small]):
                return  # the session was deleted
            mark.write(said)
            try:
                file.write(data)
                if file.size != mark.bytes:
                    raise OSError(f"{file} has {file.size} bytes of the {mark.bytes} that were written")
            except BaseException:
                file.remove()
                said.remove()
                raise
        self._move(large, mark)
        logger.info("%d objects of session %s became one, %s", len(small), session_id, file.name)

    def _build(self, session_id: str, uris: Sequence[str]) -> tuple[dict[str, Mapping[str, int]], pa.Buffer]:
        """Copy all batches of small objects, but for those that are not whole, which stay as they are.

        Returns:
            The objects that were copied, with their runs' rows; and a file of all they hold.
        """
        known = self._catalogue.runs_in(session_id, uris)
        small = dict[str, Mapping[str, int]]()
        sink, schema, writer = pa.BufferOutputStream(), None, None
        for uri in uris:
            file = within(self._root, uri)
            assert isinstance(file, ObjectFile)
            try:
                batches = _whole(file.held(), schema, known[uri])
            except (OSError, ValueError, pa.ArrowException) as error:
                logger.warning("%s stays as it is: %s", uri, error)
                self._leave([uri])
                continue
            schema = schema or batches[0][0].schema
            writer = writer or pa.ipc.new_file(sink, schema)
            for batch, metadata in batches:
                writer.write_batch(batch, custom_metadata=metadata)
            small[file.name] = known[uri]
        if writer:
            writer.close()
        return small, sink.getvalue()

    def _move(self, large: HeldFile, mark: Mark) -> None:
        """Have the catalogue say where runs are now, unless it knows already or the session was deleted."""
        schema = large.reader().schema
        points = point_types(schema)
        entries = [
            Entry(run.facts, large.uri, run.first_row, run.rows, run.bytes, points, run.offset)
            for run in whole_runs(large)
        ]
        rows = sum(entry.rows for entry in entries)
        file = StoredFile(large.uri, large.size, True, rows, 0, kind_of(schema))
        folder = large.folder
        before = [folder.file(name).uri for name in mark.objects]
        self._catalogue.move(posixpath.basename(folder.path), entries, file, before)


def _of_a_size(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    some, all = list[str](), 0
    for uri, size in sizes.items():
        if some and all + size > LARGE:
            yield some
            some, all = [], 0
        some.append(uri)
        all += size
    yield some


def _all(some: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return {name: number for one in some for name, number in one.items()}


def _whole(file: HeldFile, schema: pa.Schema | None, known: Mapping[str, int]) -> list[_Batch]:
    """All batches of an object, each with its metadata.

    Args:
        file: The object.
        schema: That it must have.
        known: Its runs and their rows, as they were listed.

    Raises:
        DamagedError: It does not hold these runs alone, or they are not as they were written.
        ValueError: A batch's metadata is damaged.
        pa.ArrowException: It is no Arrow file, or damaged.
    """
    reader, stream = file.reader(), pa.ipc.open_stream(file.data[8:])
    if not all(stream.schema.equals(other, check_metadata=True) for other in (reader.schema, schema or reader.schema)):
        raise DamagedError("its footer, or what it was listed as, is of other columns")
    batches: list[_Batch] = list(stream.iter_batches_with_custom_metadata())
    for batch, metadata in batches:
        batch.validate(full=True)
        facts = batch_facts(metadata)
        if bad := changed(batch, facts, checksums.read(metadata, batch.schema.names)):
            raise DamagedError(f"of run {facts.run_id} {', '.join(bad)} are not as they were written")
        if tuple(batch["phase"].dictionary.to_pylist()) != PHASES:
            raise DamagedError(f"of run {facts.run_id} the phases are not as they were written")
    runs = {run.facts.run_id: run.rows for run in whole_runs(file)}
    rows = sum(batch.num_rows for batch, _ in batches)
    if runs != known or sum(runs.values()) != rows or len(batches) != reader.num_record_batches:
        raise DamagedError(f"it has {len(runs)} runs of {rows} rows, and was listed with {len(known)}")
    return batches
