"""What the store holds, in memory: rebuilt from the files alone, kept up to date by the writer."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from deployments.activations.facts import PointType, RunFacts, StoredPoint, StoredRun, names_a_session, page
from deployments.activations.reader import is_sealed, whole_runs
from deployments.activations.schema import point_types


class StoredFile(NamedTuple):
    """One shard; `bytes` is its length."""

    uri: str
    bytes: int
    sealed: bool


class Entry(NamedTuple):
    """One stored run; `points` is shared by all runs of its file, and its interventions are left to the file."""

    facts: RunFacts
    uri: str
    first_row: int
    rows: int
    bytes: int
    points: Mapping[str, PointType]

    def stored(self) -> StoredRun:
        """The run with each point's place spelled out."""
        points = {
            name: StoredPoint(self.uri, self.first_row, (self.rows, *point.shape), point.dtype)
            for name, point in self.points.items()
        }
        return StoredRun(self.facts.run_id, self.facts.session_id, points, self.bytes)


@dataclass
class _Session:
    runs: dict[str, Entry] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    tokens: int = 0
    models: set[str] = field(default_factory=set)
    created: float = float("inf")
    updated: float = 0.0

    def add(self, entry: Entry) -> None:
        # They may be a thousand times as long as all else that is known of a run.
        self.runs[entry.facts.run_id] = entry._replace(facts=replace(entry.facts, interventions=[]))
        self.tokens += entry.facts.tokens
        self.models.add(entry.facts.model)
        self.created = min(self.created, entry.facts.created)
        self.updated = max(self.updated, entry.facts.created)


logger = logging.getLogger(__name__)


class Catalogue:
    """Sessions, runs and files. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sessions: dict[str, _Session] = {}

    @classmethod
    def rebuild(cls, root: Path) -> Catalogue:
        """Read what the files under `root` say; links are not followed, other names are passed over."""
        catalogue = cls()
        for folder in os.scandir(root):
            if folder.is_dir(follow_symlinks=False) and names_a_session(folder.name):
                try:
                    catalogue._read_session(folder)
                except OSError:  # one unreadable session must not keep the others from being served
                    logger.exception("session %s cannot be read and is not listed", folder.name)
        return catalogue

    def _read_session(self, folder: os.DirEntry[str]) -> None:
        for item in sorted(os.scandir(folder), key=lambda item: item.name):
            if item.name.endswith(".arrow") and item.is_file(follow_symlinks=False):
                path = Path(item.path)
                file = StoredFile(path.as_uri(), item.stat().st_size, is_sealed(path))
                if entries := _entries(path):
                    self.add(folder.name, entries, file)

    def add(self, session_id: str, entries: Iterable[Entry], file: StoredFile) -> None:
        """Add runs of one file, and the file as it is now."""
        with self._lock:
            session = self._sessions.setdefault(session_id, _Session())
            session.files[file.uri] = file
            for entry in entries:
                session.add(entry)

    def drop(self, session_id: str) -> bool:
        """Forget a session; false if it was not known."""
        with self._lock:
            return self._sessions.pop(session_id, None) is not None

    def holds(self, session_id: str, run_id: str) -> bool:
        """Whether the session has a run of this id."""
        with self._lock:
            return session_id in self._sessions and run_id in self._sessions[session_id].runs

    def find(self, run_id: str) -> Entry | None:
        """A run by its id, which the server makes unique; None if there is none."""
        with self._lock:
            return next((found for one in self._sessions.values() if (found := one.runs.get(run_id))), None)

    def sessions(self, limit: int = 100, after: str | None = None) -> list[dict[str, Any]]:
        """Up to `limit` sessions in the order of their ids, beginning behind `after`."""
        with self._lock:
            return [_summary(name, self._sessions[name]) for name in page(self._sessions, limit, after)]

    def session(self, session_id: str) -> dict[str, Any] | None:
        """One session with its runs, oldest first, and its files; None if there is none."""
        with self._lock:
            if (session := self._sessions.get(session_id)) is None:
                return None
            entries = sorted(session.runs.values(), key=lambda entry: entry.facts.created)
            files = [file._asdict() for file in session.files.values()]
            summary = _summary(session_id, session)
        return {**summary, "runs": [_run(entry) for entry in entries], "files": files}


def _entries(path: Path) -> list[Entry]:
    entries = list[Entry]()
    points: dict[str, PointType] | None = None
    for run in whole_runs(path):
        points = points or point_types(run.batches[0].schema)
        rows = sum(batch.num_rows for batch in run.batches)
        entries.append(Entry(run.facts, path.as_uri(), run.first_row, rows, run.bytes, points))
    return entries


def _summary(session_id: str, session: _Session) -> dict[str, Any]:
    return {
        "id": session_id,
        "runs": len(session.runs),
        "tokens": session.tokens,
        "bytes": sum(file.bytes for file in session.files.values()),
        "models": sorted(session.models),
        "created": session.created,
        "updated": session.updated,
    }


def _run(entry: Entry) -> dict[str, Any]:
    facts = entry.facts
    return {
        "run_id": facts.run_id,
        "model": facts.model,
        "created": facts.created,
        "prompt_tokens": facts.prompt_tokens,
        "tokens": facts.tokens,
        "sample_id": facts.sample_id,
        "tags": facts.tags,
        "finish_reason": facts.finish_reason,
        "points": {
            name: {**point._asdict(), "shape": list(point.shape)} for name, point in entry.stored().points.items()
        },
    }
