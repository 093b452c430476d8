"""Queries of an index's database."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from deployments.accounts import Account
from deployments.activations.facts import PointType, RunInfo, RunName, RunRecord, SessionName
from deployments.activations.filters import EVERYTHING, Filter
from deployments.activations.index.database import tag_line
from deployments.errors import RequestError

_ENTRIES = """SELECT runs.facts, files.path, runs.first_row, runs.rows, runs.bytes, files.points, runs.offset,
    files.archived, files.local FROM runs JOIN files ON files.id = runs.file"""
_SUMS = """SELECT session, owner, count(*), sum(tokens), sum(bytes), json_group_array(DISTINCT model),
    min(created), max(created) FROM runs INDEXED BY runs_by_session"""
_ALL_SUMS = """SELECT session, owner, sum(runs), sum(tokens), sum(bytes), json_group_array(model),
    (SELECT min(created) FROM runs AS own WHERE own.session = runs.session AND own.owner = runs.owner),
    max(last) FROM sums AS runs"""
_PAGE = 100  # sessions that one query reads
_LISTED = ["run_id", "session_id", "model", "created", "prompt_tokens", "tokens", "sample_id", "tags", "finish_reason"]


class IndexedFile(NamedTuple):
    """A file: its path below the store's directory, bytes, and whether the disk and the bucket have it, 0 or 1."""

    path: str
    bytes: int
    local: int
    archived: int


class Queries(ABC):
    """Lists sessions, runs and files; StoreError where SQLite refuses a filter that is too large."""

    root: Path  # the store's directory
    archive: str  # the bucket's URI without settings, empty where there is none

    @abstractmethod
    def select(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement selects."""

    def named(self, session_id: str, account: Account, owner: str | None = None) -> SessionName | None:
        """The session that an account means by an id: its own, to an admin else one without an owner or another's.

        None if there is none, or the account may not change the `owner`'s; RequestError if several owners have one.
        """
        owners = "SELECT owner FROM sums WHERE session = ? UNION SELECT owner FROM files WHERE session = ?"
        owners_of_id = {of or None for (of,) in self.select(owners, session_id, session_id)}
        if owner is not None:
            owners_of_id &= {owner or None}
        owners_of_id = {of for of in owners_of_id if account.may_change(of)}
        for first in (account.owner, None):
            if first in owners_of_id:
                return SessionName(first, session_id)
        if len(owners_of_id) > 1:
            names = ", ".join(sorted(of for of in owners_of_id if of))
            raise RequestError(f"{names} have a session {session_id!r} each: name one", "owner", "owner_missing", 409)
        return SessionName(owners_of_id.pop(), session_id) if owners_of_id else None

    def holds(self, name: RunName) -> bool:
        """Whether a session has a run of this id."""
        query = "SELECT 1 FROM runs WHERE run_id = ? AND session = ? AND owner = ?"
        return bool(self.select(query, name.run_id, name.session.id, name.session.owner or ""))

    def holding(self, session_id: str, names: Sequence[str]) -> set[str]:
        """Those of `names` that, with a `-`, start the id of a run of a session without an owner."""
        named = """SELECT value FROM json_each(?) WHERE EXISTS
            (SELECT 1 FROM runs WHERE run_id BETWEEN value || '-' AND value || '.' AND session = ? AND owner = '')"""
        return {name for (name,) in self.select(named, _listed(names), session_id)}

    def pinned(self) -> set[SessionName]:
        """The pinned sessions."""
        return {SessionName(owner or None, id) for id, owner in self.select("SELECT session, owner FROM pins")}

    def sizes(self, but: Collection[str] = ()) -> dict[SessionName, int]:
        """The bytes of each session's files on the disk, without those at some paths."""
        others = "local AND path NOT IN (SELECT value FROM json_each(?))"
        summed = f"SELECT session, owner, sum(bytes) FROM files WHERE {others} GROUP BY session, owner"
        return {SessionName(owner or None, id): size for id, owner, size in self.select(summed, _listed(but))}

    def files(self, session: SessionName) -> list[IndexedFile]:
        """A session's files."""
        which = "SELECT path, bytes, local, archived FROM files WHERE session = ? AND owner = ?"
        return [IndexedFile(*row) for row in self.select(which, session.id, session.owner or "")]

    def file(self, session: SessionName, name: str) -> IndexedFile | None:
        """A session's file by its name; None if there is none."""
        which = "SELECT path, bytes, local, archived FROM files WHERE path = ?"
        rows = self.select(which, f"{session.folder}/{name}")
        return IndexedFile(*rows[0]) if rows else None

    def unsealed(self) -> list[str]:
        """The paths of files on the disk that hold runs and have no footer, as far as is known."""
        return [path for (path,) in self.select("SELECT path FROM files WHERE NOT sealed AND rows IS NOT 0 AND local")]

    def sealed(self) -> dict[str, tuple[int, int]]:
        """The bytes and times of change in Unix nanoseconds of sealed files on the disk, by path."""
        which = "SELECT path, bytes, modified_ns FROM files WHERE sealed AND local AND modified_ns NOT NULL"
        return {path: (size, modified_ns) for path, size, modified_ns in self.select(which)}

    def uri_of(self, path: str, local: int) -> str:
        """A file's URI: on the disk, else in the bucket."""
        return (self.root / path).as_uri() if local else f"{self.archive}/{quote(path)}"

    def by_age(self) -> Iterator[tuple[SessionName, float]]:
        """The sessions that have runs, each with the Unix time of its last one, the oldest first; read as needed."""
        page = f"""SELECT DISTINCT session, owner, last FROM sums AS own WHERE (last, session, owner) > (?, ?, ?)
            AND NOT EXISTS (SELECT 1 FROM sums WHERE session = own.session AND owner = own.owner AND last > own.last)
            ORDER BY last, session, owner LIMIT {_PAGE}"""
        last, id, owner = -math.inf, "", ""
        while sessions := self.select(page, last, id, owner):
            yield from ((SessionName(owner or None, id), last) for id, owner, last in sessions)
            id, owner, last = sessions[-1]

    def find(self, run_id: str, owner: str | None = None) -> RunRecord | None:
        """A run by its id; of the sessions of one `owner` (empty: of none), where given; None if there is none."""
        entries = self._entries(Filter(runs=(run_id,), owner=owner), "LIMIT 1")
        return entries[0] if entries else None

    def entries(self, runs: Collection[str] | None = None) -> list[RunRecord]:
        """All runs, or those of `runs` that there are, the oldest first."""
        of = Filter(runs=None if runs is None else tuple(runs))
        return self._entries(of, "ORDER BY runs.created, runs.run_id")

    def sessions(self, limit: int = 100, after: str | None = None, filter: Filter = EVERYTHING) -> list[dict[str, Any]]:
        """Up to `limit` sessions with a matching run, by id and owner, after `id` or `id@owner`.

        All numbers are of matching runs.
        """
        where, values = _where(filter)
        if after is not None:
            id, at, owner = after.partition("@")
            where += " AND (runs.session, runs.owner) > (?, ?)" if at else " AND runs.session > ?"
            values += [id, owner] if at else [id]
        is_of_all = filter._replace(session=None, owner=None) == EVERYTHING
        of = _ALL_SUMS if is_of_all else _SUMS
        grouped = f"{of} WHERE {where} GROUP BY session, owner ORDER BY session, owner LIMIT ?"
        names = ("id", "owner", "runs", "tokens", "bytes", "models", "created", "updated")
        sums = [dict(zip(names, row, strict=True)) for row in self.select(grouped, *values, limit)]
        for summed in sums:
            summed["owner"] = summed["owner"] or None
            summed["models"] = sorted(json.loads(summed["models"]))
        if sums:
            between = """SELECT session, owner, sum(bytes), min(archived) FROM files
                WHERE session BETWEEN ? AND ? AND rows IS NOT 0 GROUP BY session, owner"""
            rows = self.select(between, sums[0]["id"], sums[-1]["id"])
            files = {(id, owner or None): rest for id, owner, *rest in rows}
            pinned = self.pinned()
            for summed in sums:
                size, archived = files.get((summed["id"], summed["owner"]), (summed["bytes"], 0))
                summed |= {"bytes": size} if is_of_all else {}
                summed |= {"archived": bool(archived)} if self.archive else {}
                summed["pinned"] = SessionName(summed["owner"], summed["id"]) in pinned
        return sums

    def runs(
        self, filter: Filter = EVERYTHING, limit: int | None = 100, after: str | None = None
    ) -> list[dict[str, Any]]:
        """Up to `limit` runs that match, ordered by time and id, after the run `after`, which RequestError names."""
        where, values = _where(filter)
        if after is not None:
            only, named = _where(Filter(filter.session, owner=filter.owner))
            place = self.select(f"SELECT min(created) FROM runs WHERE run_id = ? AND {only}", after, *named)[0][0]
            if place is None:
                raise RequestError(f"there is no run {after!r}", "after", "run_not_found")
            where, values = f"{where} AND (created, run_id) > (?, ?)", [*values, place, after]
        # The index finds which, so that no run's facts are read but theirs.
        order = "ORDER BY runs.created, runs.run_id, runs.session, runs.owner"
        which = f"SELECT runs.rowid FROM runs WHERE {where} {order} LIMIT ?"
        asked = f"{_ENTRIES} WHERE runs.rowid IN ({which}) {order}"
        entries = self._of_rows(self.select(asked, *values, -1 if limit is None else limit))
        return [self._run(entry) for entry in entries]

    def session(
        self, session: SessionName, limit: int | None = None, after: str | None = None
    ) -> dict[str, Any] | None:
        """One session, its runs as of `runs`, and the files of these runs; None if it has no run."""
        own = Filter(session.id, owner=session.owner or "")
        if not (summed := self.sessions(1, None, own)):
            return None
        runs = self.runs(own, limit, after)
        paths = {f"{session.folder}/{run['file']}" for run in runs}
        listed = """SELECT path, bytes, sealed, local FROM files
            WHERE path IN (SELECT value FROM json_each(?)) ORDER BY path"""
        files = [
            {"name": path.rpartition("/")[2], "uri": self.uri_of(path, local), "bytes": size, "sealed": bool(sealed)}
            for path, size, sealed, local in self.select(listed, _listed(paths))
        ]
        return {**summed[0], "runs": runs, "files": files}

    def _entries(self, filter: Filter, rest: str) -> list[RunRecord]:
        where, values = _where(filter)
        return self._of_rows(self.select(f"{_ENTRIES} WHERE {where} {rest}", *values))

    def _of_rows(self, selected: Iterable[tuple[Any, ...]]) -> list[RunRecord]:
        """Runs by what `_ENTRIES` selects; those of one file share its points."""
        points: dict[str, dict[str, PointType]] = {}
        entries = []
        for facts, path, first_row, rows, size, kinds_json, offset, archived, local in selected:
            if path not in points:
                kinds = json.loads(kinds_json).items()
                points[path] = {name: PointType(tuple(shape), dtype) for name, (shape, dtype) in kinds}
            run, uri = RunInfo.of(json.loads(facts)), self.uri_of(path, local)
            entries.append(RunRecord(run, path, first_row, rows, size, points[path], offset, uri, bool(archived)))
        return entries

    def _run(self, entry: RunRecord) -> dict[str, Any]:
        points = entry.location().points.items()
        return {
            **{name: getattr(entry.facts, name) for name in _LISTED},
            "owner": entry.facts.owner,
            "file": entry.path.rpartition("/")[2],
            "offset": entry.offset,
            "bytes": entry.bytes,
            **({"archived": entry.archived} if self.archive else {}),
            "points": {name: {**point._asdict(), "shape": list(point.shape)} for name, point in points},
        }


def _listed(values: Collection[str]) -> str:
    return json.dumps(list(values))


def _where(filter: Filter) -> tuple[str, list[Any]]:
    """What holds for the runs of a filter, in SQL, and its values."""
    conditions = {
        "runs.session = ?": filter.session,
        "runs.owner = ?": filter.owner,
        "model = ?": filter.model,
        "created >= ?": filter.since,
        "created < ?": filter.until,
        "sample_id = ?": filter.sample_id,
        "run_id IN (SELECT value FROM json_each(?))": None if filter.runs is None else _listed(filter.runs),
    }
    held = {condition: value for condition, value in conditions.items() if value is not None}
    tags = [f"\n{tag_line(name, value)}\n" for name, value in filter.tags]
    return " AND ".join(["1", *held, *["instr(tags, ?)"] * len(tags)]), [*held.values(), *tags]
