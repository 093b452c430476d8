"""A stored run and its file, as the writer tells them and as the catalogue's database holds them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

from deployments.activations.facts import PointType, RunFacts, StoredPoint, StoredRun

ENTRIES = """SELECT runs.facts, files.uri, runs.first_row, runs.rows, runs.bytes, files.points, runs.offset
    FROM runs JOIN files ON files.id = runs.file"""


class RunName(NamedTuple):
    """What tells a run from all others."""

    session_id: str
    run_id: str


class StoredFile(NamedTuple):
    """One shard; `bytes` is its length, `rows` those of its whole runs.

    `modified_ns` is when it last changed in Unix nanoseconds, None where it may have changed since. `kind` is the same
    for objects whose runs fit one object; empty of files of a disk, and of what cannot be read.
    """

    uri: str
    bytes: int
    sealed: bool
    rows: int
    modified_ns: int | None
    kind: str = ""


class Entry(NamedTuple):
    """One stored run; `points` is shared by all runs of its file, and its interventions and text are left to the file.

    `offset` is where in its file it begins: 0 for the first run, else the byte of its first batch, of an object its
    number.
    """

    facts: RunFacts
    uri: str
    first_row: int
    rows: int
    bytes: int
    points: Mapping[str, PointType]
    offset: int

    def stored(self) -> StoredRun:
        """The run with each point's place spelled out."""
        points = {
            name: StoredPoint(self.uri, self.first_row, (self.rows, *point.shape), point.dtype)
            for name, point in self.points.items()
        }
        return StoredRun(self.facts.run_id, self.facts.session_id, points, self.bytes)


class Known(Protocol):
    """What a writer tells of runs, and asks: a catalogue, or what stands for one on another node.

    Attributes:
        looks: How often files were looked at behind the writer's back: what is known of them may be otherwise since.
    """

    looks: int

    def add(self, session_id: str, entries: Iterable[Entry], file: StoredFile) -> int:
        """Add runs of one file, and the file as it is now; how many bytes more it has than was known."""

    def holds(self, session_id: str, run_id: str) -> bool:
        """Whether the session has a run of this id, as far as is known here."""

    def drop(self, session_id: str) -> bool:
        """Forget a session; false if it was not known."""

    def knows(self, session_id: str) -> bool:
        """Whether the session has a run."""

    def sizes(self, but: Collection[str] = ()) -> dict[str, int]:
        """The bytes of each session's files, without those of these URIs."""

    def files(self, session_id: str) -> dict[str, int]:
        """The bytes of a session's files by their URIs."""

    def last_runs(self) -> list[tuple[str, float]]:
        """Of each session that has a run when the last was made, in Unix seconds."""

    def look(self) -> None:
        """Look at the files again: others may have changed them."""


_KEPT = [item.name for item in fields(RunFacts) if item.name not in ("interventions", "text")]


def row_of(session_id: str, entry: Entry) -> tuple[Any, ...]:
    """A run as the table holds it, without what may be a thousand times as long as all else."""
    facts = entry.facts
    return (
        session_id,
        facts.run_id,
        float(facts.created),
        str(facts.model),
        facts.sample_id,
        "\n".join(["", *(tag_line(name, value) for name, value in facts.tags.items()), ""]),
        int(facts.tokens),
        entry.bytes,
        entry.rows,
        entry.first_row,
        entry.offset,
        json.dumps({name: getattr(facts, name) for name in _KEPT} | {"session_id": session_id}),
    )


def tag_line(name: str, value: str) -> str:
    """A tag on a line of its own: JSON writes no line break."""
    return f"{json.dumps(name)}:{json.dumps(value)}"


def entries_of(found: Iterable[tuple[Any, ...]]) -> list[Entry]:
    """Runs by what `ENTRIES` selects; those of one file share its points."""
    points: dict[str, dict[str, PointType]] = {}
    entries = []
    for facts, uri, first_row, rows, size, said, offset in found:
        if uri not in points:
            points[uri] = {name: PointType(tuple(shape), dtype) for name, (shape, dtype) in json.loads(said).items()}
        entries.append(Entry(RunFacts(**json.loads(facts)), uri, first_row, rows, size, points[uri], offset))
    return entries
