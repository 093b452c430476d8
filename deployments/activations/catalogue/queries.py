"""Queries of a catalogue's database."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from deployments.activations.catalogue.rows import ENTRIES, entries_of, tag_line
from deployments.activations.facts import Entry, StoredFile, name_of
from deployments.activations.filters import EVERYTHING, Filter
from deployments.errors import RequestError

_SUMS = """SELECT session, count(*), sum(tokens), sum(bytes), json_group_array(DISTINCT model),
    min(created), max(created) FROM runs INDEXED BY runs_by_session"""
_ALL_SUMS = """SELECT session, sum(runs), sum(tokens), sum(bytes), json_group_array(model),
    (SELECT min(created) FROM runs AS own WHERE own.session = runs.session),
    max(last) FROM sums AS runs"""
_PAGE = 100  # sessions that one query reads
_LISTED = ["run_id", "session_id", "model", "created", "prompt_tokens", "tokens", "sample_id", "tags", "finish_reason"]


class Queries(ABC):
    """Lists sessions, runs and files; StoreError where SQLite refuses a filter that is too large."""

    archives: bool = False  # whether files also go to a bucket, so that it is listed whether each is there

    @abstractmethod
    def select(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement selects."""

    def holds(self, session_id: str, run_id: str) -> bool:
        """Whether the session has a run of this id."""
        return bool(self.select("SELECT 1 FROM runs WHERE run_id = ? AND session = ?", run_id, session_id))

    def holding(self, session_id: str, names: Sequence[str]) -> set[str]:
        """Those of `names` that are, with a `-` after them, the beginning of an id of one of the session's runs."""
        named = """SELECT value FROM json_each(?) WHERE EXISTS
            (SELECT 1 FROM runs WHERE run_id BETWEEN value || '-' AND value || '.' AND session = ?)"""
        return {name for (name,) in self.select(named, _listed(names), session_id)}

    def version(self, session_id: str) -> tuple[int, ...]:
        """A value that changes whenever the session's runs do."""
        return tuple(mark for (mark,) in self.select("SELECT mark FROM sums WHERE session = ?", session_id))

    def knows(self, session_id: str) -> bool:
        """Whether the session has a run."""
        return bool(self.select("SELECT 1 FROM runs WHERE session = ? LIMIT 1", session_id))

    def sizes(self, but: Collection[str] = ()) -> dict[str, int]:
        """The bytes of each session's files, except those with these URIs."""
        others = "uri NOT IN (SELECT value FROM json_each(?))"
        return dict(self.select(f"SELECT session, sum(bytes) FROM files WHERE {others} GROUP BY session", _listed(but)))

    def files(self, session_id: str) -> dict[str, int]:
        """The bytes of a session's files by their URIs."""
        return dict(self.select("SELECT uri, bytes FROM files WHERE session = ?", session_id))

    def segments(self, session_id: str | None) -> list[tuple[str, str, bool, int]]:
        """Session, URI, whether it is archived, and, if not on the disk, the number of runs, of a session's files.

        Of all sessions' without an id; those without a run are left out.
        """
        counted = "iif(uri LIKE 'file:%', 0, (SELECT count(*) FROM runs WHERE file = files.id))"
        where = "? IS NULL" if session_id is None else "session = ?"  # which an index serves
        found = self.select(
            f"SELECT session, uri, archived, {counted} FROM files WHERE {where} AND rows IS NOT 0", session_id
        )
        return [(session, uri, bool(archived), runs) for session, uri, archived, runs in found]

    def files_of(self, beginning: str) -> dict[str, tuple[int, int]]:
        """The bytes and numbers of runs of all files whose URIs begin so, by `<session>/<segment>`."""
        counted = "SELECT uri, bytes, (SELECT count(*) FROM runs WHERE file = files.id) FROM files"
        found = self.select(f"{counted} WHERE substr(uri, 1, ?) = ?", len(beginning), beginning)
        return {name_of(uri): (size, runs) for uri, size, runs in found}

    def all_files(self) -> list[tuple[str, StoredFile]]:
        """All files that hold runs, each with its session."""
        found = self.select("SELECT session, uri, bytes, sealed, rows, modified_ns FROM files WHERE rows IS NOT 0")
        return [(row[0], StoredFile(row[1], row[2], bool(row[3]), *row[4:])) for row in found]

    def unsealed(self) -> list[str]:
        """The URIs of files on the disk that hold runs and have no footer, as far as is known."""
        found = self.select("SELECT uri FROM files WHERE NOT sealed AND rows IS NOT 0 AND uri LIKE 'file:%'")
        return [uri for (uri,) in found]

    def of_file(self, uri: str) -> list[Entry]:
        """The runs of one file, in the order in which they were added."""
        return entries_of(self.select(f"{ENTRIES} WHERE files.uri = ? ORDER BY runs.rowid", uri))

    def last_run(self, session_id: str) -> float | None:
        """The Unix time of a session's last run; None if it has none."""
        [(last,)] = self.select("SELECT max(last) FROM sums WHERE session = ?", session_id)
        return None if last is None else float(last)

    def by_age(self) -> Iterator[tuple[str, float]]:
        """The sessions that have runs, each with the Unix time of its last one, the oldest first; read as needed."""
        page = f"""SELECT DISTINCT session, last FROM sums AS own WHERE (last, session) > (?, ?)
            AND NOT EXISTS (SELECT 1 FROM sums WHERE session = own.session AND last > own.last)
            ORDER BY last, session LIMIT {_PAGE}"""
        last, session_id = -math.inf, ""
        while found := self.select(page, last, session_id):
            yield from found
            session_id, last = found[-1]

    def find(self, run_id: str) -> Entry | None:
        """A run by its id; None if there is none."""
        return next(iter(entries_of(self.select(f"{ENTRIES} WHERE runs.run_id = ? LIMIT 1", run_id))), None)

    def entries(self, session_id: str | None, runs: Collection[str] | None = None) -> list[Entry]:
        """The runs of a session, or of all, or those of `runs` that there are, the oldest first."""
        where, values = _where(Filter(session_id, runs=None if runs is None else tuple(runs)))
        return entries_of(self.select(f"{ENTRIES} WHERE {where} ORDER BY runs.created, runs.run_id", *values))

    def places(
        self, session_id: str, runs: Collection[str] | None = None, most: int | None = None
    ) -> list[tuple[str, str, int, int]]:
        """Id, file URI, offset and bytes of the runs of `entries`, or of the `most` added first, ordered by id."""
        where, values = _where(Filter(session_id, runs=None if runs is None else tuple(runs)))
        found = f"""SELECT runs.run_id, files.uri, runs.offset, runs.bytes FROM runs JOIN files ON files.id = runs.file
            WHERE {where} ORDER BY runs.rowid LIMIT ?"""
        return sorted(self.select(found, *values, -1 if most is None else most))

    def sessions(self, limit: int = 100, after: str | None = None, filter: Filter = EVERYTHING) -> list[dict[str, Any]]:
        """Up to `limit` sessions with a matching run, by id, after `after`; all numbers are of matching runs."""
        where, values = _where(filter)
        if after is not None:
            where, values = f"{where} AND session > ?", [*values, after]
        is_of_all = filter._replace(session=None, among=None) == EVERYTHING
        of = _ALL_SUMS if is_of_all else _SUMS
        found = self.select(f"{of} WHERE {where} GROUP BY session ORDER BY session LIMIT ?", *values, limit)
        names = ("id", "runs", "tokens", "bytes", "models", "created", "updated")
        sums = [dict(zip(names, row, strict=True)) for row in found]
        for one in sums:
            one["models"] = sorted(json.loads(one["models"]))
        if sums and (is_of_all or self.archives):
            between = """SELECT session, sum(bytes), min(archived) FROM files
                WHERE session BETWEEN ? AND ? AND rows IS NOT 0 GROUP BY session"""
            files = {row[0]: row[1:] for row in self.select(between, sums[0]["id"], sums[-1]["id"])}
            for one in sums:
                size, archived = files.get(one["id"], (one["bytes"], 0))
                one |= {"bytes": size} if is_of_all else {}
                one |= {"archived": bool(archived)} if self.archives else {}
        return sums

    def runs(
        self, filter: Filter = EVERYTHING, limit: int | None = 100, after: str | None = None
    ) -> list[dict[str, Any]]:
        """Up to `limit` runs that match, ordered by time and id, after the run `after`, which RequestError names."""
        where, values = _where(filter)
        if after is not None:
            only, named = _where(Filter(filter.session, among=filter.among))
            place = self.select(f"SELECT min(created) FROM runs WHERE run_id = ? AND {only}", after, *named)[0][0]
            if place is None:
                raise RequestError(f"there is no run {after!r}", "after", "run_not_found")
            where, values = f"{where} AND (created, run_id) > (?, ?)", [*values, place, after]
        # The index finds which, so that no run's facts are read but theirs.
        order = "ORDER BY runs.created, runs.run_id, runs.session"
        which = f"SELECT runs.rowid FROM runs WHERE {where} {order} LIMIT ?"
        found = self.select(f"{ENTRIES} WHERE runs.rowid IN ({which}) {order}", *values, -1 if limit is None else limit)
        return [_run(entry, self.archives) for entry in entries_of(found)]

    def session(
        self, session_id: str, limit: int | None = None, after: str | None = None, filter: Filter = EVERYTHING
    ) -> dict[str, Any] | None:
        """One session, its runs as of `runs`, and the files of these runs; None if no run of it matches."""
        own = filter._replace(session=session_id)
        if not (found := self.sessions(1, None, own)):
            return None
        runs = self.runs(own, limit, after)
        named = {point["uri"] for run in runs for point in run["points"].values()}
        listed = "SELECT uri, bytes, sealed FROM files WHERE uri IN (SELECT value FROM json_each(?)) ORDER BY uri"
        files = [
            {"uri": uri, "bytes": size, "sealed": bool(sealed)}
            for uri, size, sealed in self.select(listed, _listed(named))
        ]
        return {**found[0], "runs": runs, "files": files}


def _listed(values: Collection[str]) -> str:
    return json.dumps(list(values))


def _where(filter: Filter) -> tuple[str, list[Any]]:
    """What holds for the runs of a filter, in SQL, and its values."""
    conditions = {
        "runs.session = ?": filter.session,
        "model = ?": filter.model,
        "created >= ?": filter.since,
        "created < ?": filter.until,
        "sample_id = ?": filter.sample_id,
        "runs.session IN (SELECT value FROM json_each(?))": None if filter.among is None else _listed(filter.among),
        "run_id IN (SELECT value FROM json_each(?))": None if filter.runs is None else _listed(filter.runs),
    }
    held = {condition: value for condition, value in conditions.items() if value is not None}
    tags = [f"\n{tag_line(name, value)}\n" for name, value in filter.tags]
    return " AND ".join(["1", *held, *["instr(tags, ?)"] * len(tags)]), [*held.values(), *tags]


def _run(entry: Entry, archives: bool) -> dict[str, Any]:
    points = entry.stored().points.items()
    return {
        **{name: getattr(entry.facts, name) for name in _LISTED},
        "offset": entry.offset,
        **({"archived": entry.archived} if archives else {}),
        "points": {name: {**point._asdict(), "shape": list(point.shape)} for name, point in points},
    }
