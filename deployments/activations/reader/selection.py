"""Selecting stored runs and points from files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from deployments.activations.facts import PointType
from deployments.activations.segments.batches import batches_of
from deployments.activations.segments.schema import file_info, point_types
from deployments.activations.segments.segments import WholeRun, whole_runs
from deployments.errors import RequestError
from deployments.points.names import matching, nearest, some


class Wanted(NamedTuple):
    """Which runs and points to read; None is all."""

    session: str | None = None
    runs: Collection[str] | None = None
    points: Collection[str] | None = None  # names and patterns, as for `names.recorded`

    def of(self, schema: pa.Schema) -> dict[str, PointType]:
        """The wanted points of a file; RequestError for a negative layer if the number of layers is not recorded."""
        types = point_types(schema)
        if self.points is None:
            return types
        layers = file_info(schema).layers
        try:
            chosen = {name for pattern in self.points for name in matching(pattern, types, layers)}
        except ValueError as error:
            raise RequestError(str(error), "points") from error
        return {name: kind for name, kind in types.items() if name in chosen}

    def check(self, runs: Collection[str], points: Collection[str]) -> None:
        """Raise RequestError, which lists some that exist, if a wanted run or point is not among these."""
        if self.runs is not None and (unknown := [run for run in self.runs if run not in runs]):
            message = f"there is no run {unknown[0]!r}; there is {some(sorted(runs))}"
            raise RequestError(message, "run", "run_not_found", 404)
        any_layer = (re.sub(r"\.-\d+\.", ".*.", name) for name in self.points or ())  # whichever it is in its file
        absent = [name for name, at in zip(self.points or (), any_layer, strict=True) if not matching(at, points)]
        if absent:
            message = f"no such run recorded {absent[0]!r}; there is {nearest(absent[0], sorted(points))}"
            raise RequestError(message, "points", "point_not_recorded")


def select(files: Iterable[Path], wanted: Wanted) -> Iterator[WholeRun]:
    """The wanted runs of files that have a wanted point, in file order, with these points alone.

    At the end RequestError, as of `Wanted.check`, if none was such a run, or had such a point.
    """
    runs, points = set[str](), set[str]()
    for file in files:
        types: Mapping[str, PointType] | None = None  # all runs of a file have the same points
        for run in whole_runs(file):
            if wanted.session not in (None, run.facts.session_id):
                continue
            runs.add(run.facts.run_id)
            if wanted.runs is None or run.facts.run_id in wanted.runs:
                points.update(run.types)
                types = wanted.of(run.batches[0].schema) if types is None else types
                if types:
                    yield run._replace(types=types)
    wanted.check(runs, points)


def by_schema(files: Iterable[Path]) -> list[tuple[pa.Schema, list[Path]]]:
    """Group files by schema: by session, model, points and dtypes."""
    groups = dict[bytes, tuple[pa.Schema, list[Path]]]()
    for file in files:
        if first := next(batches_of(file), None):
            groups.setdefault(first.schema.serialize().to_pybytes(), (first.schema, []))[1].append(file)
    return list(groups.values())
