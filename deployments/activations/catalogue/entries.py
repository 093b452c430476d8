"""A stored run and its file, as the writer tells them and as the catalogue's database holds them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from deployments.activations.facts import Entry, PointType, RunFacts

ENTRIES = """SELECT runs.facts, files.uri, runs.first_row, runs.rows, runs.bytes, files.points, runs.offset, runs.batch,
    files.archived FROM runs JOIN files ON files.id = runs.file"""

# A run that another file holds already stays that file's.
_ADD = """INSERT INTO runs (session, run_id, file, created, model, sample_id, tags, tokens, bytes, rows, first_row,
    offset, batch, facts) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""
_SUM = """INSERT INTO sums VALUES (?, ?, ?, ?, ?, random()) ON CONFLICT (session, model) DO UPDATE SET
    runs = runs + excluded.runs, tokens = tokens + excluded.tokens, bytes = bytes + excluded.bytes,
    mark = excluded.mark"""
SUM_AGAIN = """INSERT OR REPLACE INTO sums SELECT session, model, count(*), sum(tokens), sum(bytes), random()
    FROM runs GROUP BY session, model"""
_SUM_ONE_AGAIN = SUM_AGAIN.replace("GROUP", "WHERE session = ? GROUP")
_FACTS = {item.name for item in fields(RunFacts)}
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
        entry.batch,
        json.dumps({name: getattr(facts, name) for name in _KEPT} | {"session_id": session_id}),
    )


def add_runs(database: sqlite3.Connection, session_id: str, file: int, entries: Sequence[Entry]) -> int:
    """Add runs of a file, by its number, to the catalogue's tables, and to the sums; how many were not known."""
    if not entries:
        return 0
    rows = [row_of(session_id, entry) for entry in entries]
    added = database.executemany(_ADD, [(*row[:2], file, *row[2:]) for row in rows]).rowcount
    if added == len(rows):
        database.executemany(_SUM, _sums(session_id, entries))
    elif added:
        database.execute(_SUM_ONE_AGAIN, (session_id,))
    return added


def _sums(session_id: str, entries: Sequence[Entry]) -> Iterator[tuple[str, str, int, int, int]]:
    """Of runs of a session how many there are, their tokens and bytes, by model."""
    for model in dict.fromkeys(entry.facts.model for entry in entries):
        own = [entry for entry in entries if entry.facts.model == model]
        tokens, size = sum(int(entry.facts.tokens) for entry in own), sum(entry.bytes for entry in own)
        yield session_id, str(model), len(own), tokens, size


def facts_of(said: Mapping[str, Any]) -> RunFacts:
    """A run's facts, without what a later version says of it."""
    return RunFacts(**{name: said[name] for name in _FACTS & said.keys()})


def tag_line(name: str, value: str) -> str:
    """A tag on a line of its own: JSON writes no line break."""
    return f"{json.dumps(name)}:{json.dumps(value)}"


def entries_of(found: Iterable[tuple[Any, ...]]) -> list[Entry]:
    """Runs by what `ENTRIES` selects; those of one file share its points."""
    points: dict[str, dict[str, PointType]] = {}
    entries = []
    for facts, uri, first_row, rows, size, said, offset, batch, archived in found:
        if uri not in points:
            points[uri] = {name: PointType(tuple(shape), dtype) for name, (shape, dtype) in json.loads(said).items()}
        run = facts_of(json.loads(facts))
        entries.append(Entry(run, uri, first_row, rows, size, points[uri], offset, batch, bool(archived)))
    return entries
