"""What the store holds, in an SQLite database: rebuilt from the files alone, kept up to date by the writer."""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from deployments.activations.catalogue.buckets import catalogue_of
from deployments.activations.catalogue.database import Kept, in_memory
from deployments.activations.catalogue.entries import ENTRIES, entries_of, tag_line
from deployments.activations.catalogue.manifest import Manifest
from deployments.activations.catalogue.replaying import catch_up, fill_new
from deployments.activations.catalogue.updates import forget, put, refresh
from deployments.activations.facts import Entry, StoredFile, StoreError, name_of
from deployments.activations.files.places import Place
from deployments.activations.files.sqlite import transaction
from deployments.activations.filters import EVERYTHING, Filter
from deployments.errors import RequestError

_T = TypeVar("_T")


class _Nothing:
    """Stands for no answer."""


_NOTHING = _Nothing()


logger = logging.getLogger(__name__)

# By any other index what fits would have to be sorted by session.
_AGAIN_S = 30.0  # after which files that could not be read are tried again
# Primary result codes of a database or a disk that fails, whatever was asked of it.
_FAULTS = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOTADB,
}
_SUMS = """SELECT session, count(*), sum(tokens), sum(bytes), json_group_array(DISTINCT model),
    min(created), max(created) FROM runs INDEXED BY runs_by_session"""
_ALL_SUMS = """SELECT session, sum(runs), sum(tokens), sum(bytes), json_group_array(model),
    (SELECT min(created) FROM runs WHERE runs.session = sums.session),
    (SELECT max(created) FROM runs WHERE runs.session = sums.session) FROM sums"""


class Catalogue:
    """Sessions, runs and files. Safe to use from several threads.

    Where the disk has no room for the database, or lets nothing be written to it, the catalogue answers with what it
    knew before, and looks at the files again later: they are the truth. Where the database itself fails, the catalogue
    goes on in memory. The log says why. A statement that SQLite refuses is a `StoreError`, and changes nothing.

    Attributes:
        looks: How often files were looked at: what is known may be otherwise since.
        archives: Whether its files go to a bucket, too, so that it says of each whether it is there.
        tell: Called with what is added, once it is.
        keeper: What `database.keeper_of` gives while it keeps a directory's database; empty while it is in memory.
    """

    def __init__(self) -> None:
        """One that is empty, in memory."""
        self.looks = 0
        self.keeper = ""
        self.tell: Callable[[Sequence[tuple[str, Sequence[Entry], StoredFile]]], None] = lambda added: None
        self._lock = Lock()
        self._files: Path | None = None
        self.archives = False
        self._manifest: Manifest | None = None
        self._again = math.inf  # when to look at the files once more, in the monotonic clock's seconds
        self._root: Path | None = None  # whose database it keeps, if it keeps one
        self._release: Callable[[], object] = lambda: None
        database = in_memory()
        self._hold(database, database.close)

    @classmethod
    def rebuild(cls, root: Path, manifest: Manifest | None = None) -> Catalogue:
        """What the files under `root` say, and a bucket's manifest; only what its database does not know is read.

        Links are not followed, other names are passed over. A directory's database is one catalogue's at a time:
        others are in memory.

        Args:
            root: The store's directory.
            manifest: Of the bucket that it archives to. Where it cannot be read the catalogue says what it knew, until
                `catch_up`.
        """
        catalogue = cls()
        catalogue._manifest, catalogue.archives = manifest, manifest is not None
        try:
            root.mkdir(parents=True, exist_ok=True)
            kept = Kept(root, catalogue._fill if manifest else None)
        except (OSError, sqlite3.Error) as error:
            logger.warning("the catalogue of %s is held in memory: %s", root, error)
            database = in_memory(root)
            catalogue._hold(database, database.close)
            catalogue._files = root
        else:
            catalogue._hold(kept.connection, kept.close)
            catalogue._root = catalogue._files = root
        catalogue._guarded(catalogue._look)
        if catalogue._root is not None:  # else it could not be kept even now
            kept.say()
            catalogue.keeper = kept.keeper
        return catalogue

    @property
    def is_kept(self) -> bool:
        """Whether it keeps a directory's database, and with it the lock that one process has."""
        return self._root is not None

    @classmethod
    def copied(cls, root: Path | Place) -> Catalogue:
        """The same of a directory or a bucket in memory, beside whoever keeps its database: nothing is written."""
        catalogue = cls()
        if isinstance(root, Place):
            catalogue._hold(catalogue_of(root), lambda: None)
            return catalogue
        database = in_memory(root)
        catalogue._hold(database, database.close)
        refresh(database, root)
        return catalogue

    def catch_up(self) -> bool:
        """Learn what the bucket's manifest says; whether there was anything.

        Raises:
            OSError: The bucket refuses.
        """
        manifest, files = self._manifest, self._files
        if manifest is None or files is None:
            return False
        names = manifest.names()

        def caught_up(database: sqlite3.Connection) -> bool:
            news = catch_up(database, manifest, names, files)
            if news:
                self._look(database)
            return news

        return self._guarded(caught_up)

    def close(self) -> None:
        """Let another catalogue keep the database."""
        with self._lock:
            self._release()

    def add(self, session_id: str, entries: Iterable[Entry], file: StoredFile) -> int:
        """Add runs of one file, and the file as it is now; how many bytes more it has than was known."""
        added = list(entries)
        # No later look finds the file of another node: it has to tell again.
        otherwise = 0 if file.uri.startswith("file:") else _NOTHING
        more = self._guarded(lambda database: put(database, session_id, added, file), otherwise=otherwise)
        self.tell([(session_id, added, file)])
        return more

    def add_all(self, added: Sequence[tuple[str, Sequence[Entry], StoredFile]]) -> None:
        """The same of several files, each with its session: all or nothing."""

        def put_in(database: sqlite3.Connection) -> None:
            with transaction(database):
                for session_id, entries, file in added:
                    put(database, session_id, entries, file)

        self._guarded(put_in, otherwise=None)
        self.tell(added)

    def look(self) -> None:
        """Look at the files again: others may have changed them."""
        if self._files is not None:
            self._guarded(self._look)

    def change(self, session_ids: Collection[str], work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Change the database otherwise: what is known of these sessions' runs may be another then."""

        def changed(database: sqlite3.Connection) -> _T:
            found = work(database)
            if session_ids:
                again = "UPDATE sums SET mark = random() WHERE session IN (SELECT value FROM json_each(?))"
                database.execute(again, (_listed(session_ids),))
            return found

        return self._guarded(changed)

    @property
    def kept(self) -> Path | None:
        """The directory whose database this is; None of one that is in memory."""
        return self._root

    def drop(self, session_id: str) -> bool:
        """Forget a session; false if it was not known."""

        def dropped(database: sqlite3.Connection) -> bool:
            with transaction(database):
                database.execute("DELETE FROM files WHERE session = ?", (session_id,))
                database.execute("DELETE FROM sums WHERE session = ?", (session_id,))  # at once, and not run by run
                return database.execute("DELETE FROM runs WHERE session = ?", (session_id,)).rowcount > 0

        return self._guarded(dropped, otherwise=True)

    def holds(self, session_id: str, run_id: str) -> bool:
        """Whether the session has a run of this id."""
        return bool(self._all("SELECT 1 FROM runs WHERE run_id = ? AND session = ?", run_id, session_id))

    def holding(self, session_id: str, names: Sequence[str]) -> set[str]:
        """Those names of which the session has a run whose id is the name, a `-` and something more."""
        named = (
            "SELECT value FROM json_each(?) WHERE EXISTS "
            "(SELECT 1 FROM runs WHERE run_id BETWEEN value || '-' AND value || '.' AND session = ?)"  # `.` follows `-`
        )
        return {name for (name,) in self._all(named, _listed(names), session_id)}

    def version(self, session_id: str) -> tuple[int, ...]:
        """As long as it is the same, so is what is known of a session's runs."""
        return tuple(mark for (mark,) in self._all("SELECT mark FROM sums WHERE session = ?", session_id))

    def query(self, statement: str, values: Sequence[Any]) -> tuple[str, list[Any]]:
        """The rows that a statement selects, and who keeps the database that they are from; for `SharedCatalogue`."""
        rows = self._all(statement, *values)
        with self._lock:  # where files are to be looked at again, somebody has to ask for it here
            return self.keeper if self._again == math.inf else "", rows

    def knows(self, session_id: str) -> bool:
        """Whether the session has a run."""
        return bool(self._all("SELECT 1 FROM runs WHERE session = ? LIMIT 1", session_id))

    def sizes(self, but: Collection[str] = ()) -> dict[str, int]:
        """The bytes of each session's files, without those of these URIs."""
        others = "uri NOT IN (SELECT value FROM json_each(?))"
        return dict(self._all(f"SELECT session, sum(bytes) FROM files WHERE {others} GROUP BY session", _listed(but)))

    def files(self, session_id: str) -> dict[str, int]:
        """The bytes of a session's files by their URIs."""
        return dict(self._all("SELECT uri, bytes FROM files WHERE session = ?", session_id))

    def files_of(self, beginning: str) -> dict[str, tuple[int, int]]:
        """Of all files whose URIs begin so the bytes, and how many runs are known, by `<session>/<segment>`."""
        counted = "SELECT uri, bytes, (SELECT count(*) FROM runs WHERE file = files.id) FROM files"
        found = self._all(f"{counted} WHERE substr(uri, 1, ?) = ?", len(beginning), beginning)
        return {name_of(uri): (size, runs) for uri, size, runs in found}

    def forget_files(self, beginning: str) -> None:
        """Forget all files whose URIs begin so, and the runs in them."""
        begin = "SELECT uri FROM files WHERE substr(uri, 1, ?) = ?"
        found = [uri for (uri,) in self._all(begin, len(beginning), beginning)]
        if found:
            self._guarded(lambda database: forget(database, found))

    def all_files(self) -> list[tuple[str, StoredFile]]:
        """All files that hold runs, each with its session."""
        found = self._all("SELECT session, uri, bytes, sealed, rows, modified_ns FROM files WHERE rows IS NOT 0")
        return [(row[0], StoredFile(row[1], row[2], bool(row[3]), *row[4:])) for row in found]

    def of_file(self, uri: str) -> list[Entry]:
        """The runs of one file, in the order in which they were added."""
        return entries_of(self._all(f"{ENTRIES} WHERE files.uri = ? ORDER BY runs.rowid", uri))

    def last_runs(self, session_id: str | None = None) -> list[tuple[str, float]]:
        """Of one session, or each, that has a run when the last was made, in Unix seconds."""
        last = "SELECT max(created) FROM runs WHERE session = known.session"
        if session_id is None:
            found = self._all(f"SELECT session, ({last}) FROM (SELECT DISTINCT session FROM files) AS known")
        else:
            found = self._all(f"SELECT session, ({last}) FROM (SELECT ? AS session) AS known", session_id)
        return [(session_id, created) for session_id, created in found if created is not None]

    def find(self, run_id: str) -> Entry | None:
        """A run by its id, which the server makes unique; None if there is none."""
        return next(iter(entries_of(self._all(f"{ENTRIES} WHERE runs.run_id = ? LIMIT 1", run_id))), None)

    def entries(self, session_id: str, runs: Collection[str] | None = None) -> list[Entry]:
        """A session's runs, or of these those it has, the oldest first; of a large session, named ones cost little."""
        named = "" if runs is None else " AND runs.run_id IN (SELECT value FROM json_each(?))"
        values = [session_id] if runs is None else [session_id, json.dumps([*runs])]
        order = "ORDER BY runs.created, runs.run_id"
        return entries_of(self._all(f"{ENTRIES} WHERE runs.session = ?{named} {order}", *values))

    def places(
        self, session_id: str, runs: Collection[str] | None = None, most: int | None = None
    ) -> list[tuple[str, str, int, int]]:
        """Of the runs of `entries`, or of the `most` that were added first: id, URI of the file, offset and bytes.

        In the order of their ids.
        """
        named = "" if runs is None else " AND runs.run_id IN (SELECT value FROM json_each(?))"
        values = [session_id] if runs is None else [session_id, json.dumps([*runs])]
        return sorted(
            self._all(
                f"""SELECT runs.run_id, files.uri, runs.offset, runs.bytes FROM runs JOIN files ON files.id = runs.file
                WHERE runs.session = ?{named} ORDER BY runs.rowid LIMIT ?""",
                *values,
                -1 if most is None else most,
            )
        )

    def sessions(self, limit: int = 100, after: str | None = None, filter: Filter = EVERYTHING) -> list[dict[str, Any]]:
        """Up to `limit` sessions that hold a run of the filter, in the order of their ids, beginning behind `after`.

        Their numbers are those of the runs of the filter; only without one `bytes` are the files'.
        """
        where, values = _where(filter)
        where, values = (f"{where} AND session > ?", [*values, after]) if after is not None else (where, values)
        is_of_all = filter._replace(session=None, among=None, without=()) == EVERYTHING
        of = _ALL_SUMS if is_of_all else _SUMS
        found = self._all(f"{of} WHERE {where} GROUP BY session ORDER BY session LIMIT ?", *values, limit)
        sums = [
            {
                "id": session_id,
                "runs": runs,
                "tokens": tokens,
                "bytes": size,
                "models": sorted(json.loads(models)),
                "created": created,
                "updated": updated,
            }
            for session_id, runs, tokens, size, models, created, updated in found
        ]
        if sums and is_of_all:
            between = "SELECT session, sum(bytes) FROM files WHERE session BETWEEN ? AND ? AND rows IS NOT 0"
            sizes = dict(self._all(f"{between} GROUP BY session", sums[0]["id"], sums[-1]["id"]))
            sums = [one | {"bytes": sizes.get(one["id"], one["bytes"])} for one in sums]
        if sums and self.archives:
            between = "SELECT session, min(archived) FROM files WHERE session BETWEEN ? AND ? AND rows IS NOT 0"
            archived = dict(self._all(f"{between} GROUP BY session", sums[0]["id"], sums[-1]["id"]))
            sums = [one | {"archived": bool(archived.get(one["id"]))} for one in sums]
        return sums

    def runs(
        self, filter: Filter = EVERYTHING, limit: int | None = 100, after: str | None = None
    ) -> list[dict[str, Any]]:
        """Up to `limit` runs of the filter, or all, the oldest first and then by their ids, behind the run `after`.

        Raises:
            RequestError: There is no run `after` in the filter's session, or in any; names `after`.
        """
        where, values = _where(filter)
        if after is not None:
            only, named = _where(Filter(filter.session, among=filter.among, without=filter.without))
            place = self._all(f"SELECT min(created) FROM runs WHERE run_id = ? AND {only}", after, *named)[0][0]
            if place is None:
                raise RequestError(f"there is no run {after!r}", "after", "run_not_found")
            where, values = f"{where} AND (created, run_id) > (?, ?)", [*values, place, after]
        # The index finds which, so that no run's facts are read but theirs.
        order = "ORDER BY runs.created, runs.run_id, runs.session"
        which = f"SELECT runs.rowid FROM runs WHERE {where} {order} LIMIT ?"
        found = self._all(f"{ENTRIES} WHERE runs.rowid IN ({which}) {order}", *values, -1 if limit is None else limit)
        return [_run(entry, self.archives) for entry in entries_of(found)]

    def session(
        self, session_id: str, limit: int | None = None, after: str | None = None, filter: Filter = EVERYTHING
    ) -> dict[str, Any] | None:
        """One session with its files and, as by `runs`, its runs; None if it holds no run of the filter.

        Raises:
            RequestError: It has no run `after`; names `after`.
        """
        own = filter._replace(session=session_id)
        if not (found := self.sessions(1, None, own)):
            return None
        told = "SELECT uri, bytes, sealed FROM files WHERE session = ? AND rows IS NOT 0 ORDER BY uri"
        files = [
            {"uri": uri, "bytes": size, "sealed": bool(sealed)} for uri, size, sealed in self._all(told, session_id)
        ]
        return {**found[0], "runs": self.runs(own, limit, after), "files": files}

    def _all(self, statement: str, *values: Any) -> list[Any]:
        return self._guarded(lambda database: database.execute(statement, values).fetchall())

    def _guarded(self, work: Callable[[sqlite3.Connection], _T], otherwise: _T | _Nothing = _NOTHING) -> _T:
        """Do something; where the database fails, do it in memory from then on.

        Args:
            work: What to do.
            otherwise: What to answer where the disk lets nothing be written: the files say it later.

        Raises:
            StoreError: SQLite refuses the statement, or the disk a write that has no other answer.
        """
        with self._lock:
            try:
                if time.monotonic() >= self._again:
                    self._look_again(self._database)
                return work(self._database)
            except sqlite3.Error as error:
                if not is_at_fault(self._database, error):
                    raise StoreError(f"The catalogue cannot look for that: {error}.") from error
                root = self._root
                if root is None:
                    raise
                if _is_refused(error):
                    logger.error("the catalogue of %s is not up to date until it can be written: %s", root, error)
                    self._again = time.monotonic() + _AGAIN_S
                    if isinstance(otherwise, _Nothing):
                        raise StoreError(f"The catalogue cannot be written ({error}): make room, or let it.") from error
                    return otherwise
                logger.exception("the catalogue of %s is held in memory from now on: %s", root, error)
            database = in_memory(root)
            self._look_again(database)
            self._hold(database, database.close)
            self._root, self.keeper = None, ""
            return work(database)

    def _look(self, database: sqlite3.Connection) -> None:
        """Read files that are not known as they are; what could not be read is tried again after a while."""
        assert self._files is not None
        self.looks += 1
        self._again = (
            math.inf
            if refresh(database, self._files, self._manifest.bases if self._manifest else None)
            else time.monotonic() + _AGAIN_S
        )

    def _fill(self, path: Path) -> None:
        """Put the bucket's newest snapshot where there is no database."""
        assert self._manifest is not None
        try:
            fill_new(path, self._manifest)
        except OSError:
            logger.exception(
                "the manifest of %s cannot be read: only files of the disk are listed", self._manifest.place
            )

    def _look_again(self, database: sqlite3.Connection) -> None:
        """The same where somebody asks for something else: without the files the database answers as far as it can."""
        try:
            self._look(database)
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and not _is_refused(error):
                raise
            logger.exception("%s cannot be looked through: the catalogue is as it was, or empty", self._files)
            self._again = time.monotonic() + _AGAIN_S

    def _hold(self, database: sqlite3.Connection, close: Callable[[], None]) -> None:
        self._release()
        self._database = database
        self._release = release = weakref.finalize(self, close)
        release.atexit = False  # a writer's thread may still need it


def is_at_fault(database: sqlite3.Connection, error: sqlite3.Error) -> bool:
    """Whether the database failed, and not the statement: then it fails at the plainest one, too."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _FAULTS:  # the rest of an extended code is detail
        return True
    try:
        database.execute("SELECT 1 FROM files, runs LIMIT 1")
    except sqlite3.Error:
        return True
    return False


def _is_refused(error: sqlite3.Error) -> bool:
    """Whether the disk refused to write to the database, which reads as before."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)


def _listed(values: Collection[str]) -> str:
    return json.dumps(list(values))


def _where(filter: Filter) -> tuple[str, list[Any]]:
    """What holds for the runs of a filter, in SQL, and its values."""
    held = {
        "session = ?": filter.session,
        "model = ?": filter.model,
        "created >= ?": filter.since,
        "created < ?": filter.until,
        "sample_id = ?": filter.sample_id,
        "session IN (SELECT value FROM json_each(?))": None if filter.among is None else _listed(filter.among),
        "session NOT IN (SELECT value FROM json_each(?))": _listed(filter.without) if filter.without else None,
        "run_id IN (SELECT value FROM json_each(?))": None if filter.runs is None else _listed(filter.runs),
    }
    conditions = {condition: value for condition, value in held.items() if value is not None}
    tags = [f"\n{tag_line(name, value)}\n" for name, value in filter.tags]
    where = " AND ".join(["1", *conditions, *["instr(tags, ?)"] * len(tags)])
    return where, [*conditions.values(), *tags]


def _run(entry: Entry, archives: bool) -> dict[str, Any]:
    facts = entry.facts
    return {
        "run_id": facts.run_id,
        "session_id": facts.session_id,
        "model": facts.model,
        "created": facts.created,
        "prompt_tokens": facts.prompt_tokens,
        "tokens": facts.tokens,
        "sample_id": facts.sample_id,
        "tags": facts.tags,
        "finish_reason": facts.finish_reason,
        "offset": entry.offset,
        **({"archived": entry.archived} if archives else {}),
        "points": {
            name: {**point._asdict(), "shape": list(point.shape)} for name, point in entry.stored().points.items()
        },
    }
