"""Where the rows of stored runs lie in their files: enough to read any of them without Arrow."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from deployments.activations.facts import PointType, RunFacts
from deployments.activations.locating import chosen
from deployments.activations.messages import Message, messages
from deployments.activations.reader import whole_runs
from deployments.activations.schema import PHASES, dtype_of, point_types
from deployments.activations.selecting import Wanted
from deployments.activations.stored_rows import positions_of
from deployments.points.token_choices import TokenChoice, check

Chosen = TokenChoice | Mapping[str, Any]  # which tokens, as in a request
IDS = ("position", "token_id")  # columns of one int32 a row
_WITHIN = 32  # bits of a place that count rows within its block


class Column(NamedTuple):
    """What each row has in a column: the shape and dtype of its value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Rows of whole runs, numbered in the order in which they lie in their files; no value is in memory.

    A block is rows that lie one behind the other: of one run, one phase and one record batch.

    Attributes:
        paths: The files.
        runs: Whose rows these are; their interventions and texts, which may be large, are left to the files.
        columns: `position`, `token_id`, and each point by its name.
        file: Each block's file, an index of `paths`, `[blocks]`.
        run: Each block's run, an index of `runs`, `[blocks]`.
        generated: Whether a block's tokens were generated, else they are the prompt's, `[blocks]`.
        starts: Each block's first row, and at the end how many rows there are, `[blocks + 1]`.
        offsets: The byte of its file where a block's values of a column begin, `[columns, blocks]`.
    """

    paths: list[Path]
    runs: list[RunFacts]
    columns: dict[str, Column]
    file: np.ndarray
    run: np.ndarray
    generated: np.ndarray
    starts: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all columns."""
        return sum(column.width for column in self.columns.values())

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Of row numbers, int64 `[rows]`, the `place` of each."""
        block = np.searchsorted(self.starts, rows, side="right") - 1
        return place(block, rows - self.starts[block])

    def part(self, first: int, end: int) -> RowIndex:
        """An index of the rows `first` to `end` alone, which travels light; needs at least one row."""
        low, high = np.searchsorted(self.starts, [first, end - 1], side="right") - 1
        of = slice(low, high + 1)
        starts = np.clip(self.starts[low : high + 2], first, end) - first
        skipped = np.zeros(high + 1 - low, dtype=np.int64)
        skipped[0] = first - self.starts[low]
        widths = np.array([column.width for column in self.columns.values()])
        runs, run = np.unique(self.run[of], return_inverse=True)
        files, file = np.unique(self.file[of], return_inverse=True)
        return RowIndex(
            paths=[self.paths[i] for i in files],
            runs=[self.runs[i] for i in runs],
            columns=self.columns,
            file=file,
            run=run,
            generated=self.generated[of],
            starts=starts,
            offsets=self.offsets[:, of] + widths[:, None] * skipped,
        )


def index_rows(
    source: str | os.PathLike[str],
    points: Sequence[str],
    *,
    session: str | None = None,
    runs: Collection[str] | None = None,
    tokens: Chosen = "all",
) -> RowIndex:
    """Look through files once; of a run's tensors nothing is read.

    Args:
        source: A store's or session's directory, or one file, as a path or `file://` URI; or the id of a run.
        points: The points each row is to have, as `names.recorded` reads them; a pattern means what the first run with
            any such point recorded. Runs that did not record them all are left out.
        session: This session's runs alone.
        runs: These runs alone.
        tokens: Whose rows, as `token_choices` defines them: `all`, `prompt_last`, `{"last": 3}`, `{"text": "France"}`.

    Raises:
        RequestError: There is no such run or point; a ValueError.
        ValueError: No point is named, one is an attention pattern, differs in shape or dtype from run to run, or
            was not recorded by a run that `runs` names; or no row is left.
        FileNotFoundError: There is no such source or session.
    """
    if isinstance(points, str) or not points:
        raise ValueError("points: name at least one, as a list")
    choice = check(tokens)
    if isinstance(runs, str):
        raise ValueError("runs: name them as a list")
    files, runs = chosen(source, session, runs)
    looked = _Looked(list(dict.fromkeys(points)), Wanted(session, None if runs is None else set(runs), set(points)))
    for path in files:
        if not isinstance(path, Path):
            raise ValueError(f"source: {path} is in a bucket, and rows are read out of a map: copy it to a disk first")
        looked.through(path, choice)
    return looked.index()


class _Run(NamedTuple):
    first_row: int
    end: int
    facts: RunFacts
    positions: Sequence[int]  # of its tokens, whose rows are meant


class _Block(NamedTuple):
    file: int
    run: int
    generated: bool
    rows: int
    offsets: list[int]


class _Looked:
    """What was found so far."""

    def __init__(self, points: list[str], wanted: Wanted) -> None:
        self._points, self._wanted = points, wanted  # as they were named, until a file has them all
        self._known = False
        self._columns: dict[str, Column] = {}
        self._there, self._recorded = set[str](), set[str]()
        self._lacking = ""  # what the first run without all of the points did not record
        self._paths, self._runs, self._blocks = list[Path](), list[RunFacts](), list[_Block]()

    def through(self, path: Path, choice: TokenChoice) -> None:
        """Add a file's rows."""
        schema, found = self._whole_runs(path, choice)
        if schema is None or not found:
            return
        types = point_types(schema)
        self._recorded |= set(types)
        lacking = [name for name in self._points if name not in types]
        if not self._known:
            chosen = {name: self._wanted._replace(points=[name]).of(schema) for name in self._points}
            lacking = [name for name in self._points if not chosen[name]]
            if not lacking:
                self._points, self._known = (
                    list(dict.fromkeys(name for meant in chosen.values() for name in meant)),
                    True,
                )
        if lacking:
            self._lacking = self._lacking or f"runs: {found[0].facts.run_id!r} did not record {', '.join(lacking)}"
            if self._wanted.runs is not None and len(lacking) < len(self._points):
                raise ValueError(self._lacking)
            return
        self._check(types, found[0].facts)
        number, numbers = len(self._paths), range(len(self._runs), len(self._runs) + len(found))
        self._paths.append(path)
        self._runs += [replace(run.facts, interventions=[], text=None) for run in found]
        row, left = 0, deque(zip(numbers, found, strict=True))
        for message in messages(path):
            while left and left[0][1].end <= row:
                left.popleft()
            if left and left[0][1].first_row <= row and message.batch.num_rows:
                self._add(message, number, left[0][0], left[0][1].positions)
            row += message.batch.num_rows

    def index(self) -> RowIndex:
        """All of it."""
        if self._lacking and self._wanted.runs is not None and self._blocks:
            raise ValueError(self._lacking)
        self._wanted.check(self._there, self._recorded)
        if not self._blocks:
            raise ValueError(f"points, tokens: no run has rows of {', '.join(self._points)} for such tokens")
        file, run, generated, rows, offsets = zip(*self._blocks, strict=True)
        return RowIndex(
            paths=self._paths,
            runs=self._runs,
            columns=self._columns,
            file=np.array(file),
            run=np.array(run),
            generated=np.array(generated),
            starts=np.concatenate([[0], np.cumsum(rows)]),
            offsets=np.array(offsets).T.copy(),
        )

    def _whole_runs(self, path: Path, choice: TokenChoice) -> tuple[pa.Schema | None, list[_Run]]:
        schema, found = None, list[_Run]()
        for run in whole_runs(path):
            if self._wanted.session not in (None, run.facts.session_id):
                continue
            self._there.add(run.facts.run_id)
            if self._wanted.runs is None or run.facts.run_id in self._wanted.runs:
                schema = run.batches[0].schema
                rows = sum(batch.num_rows for batch in run.batches)
                found.append(_Run(run.first_row, run.first_row + rows, run.facts, positions_of(run, choice, "tokens")))
        return schema, found

    def _check(self, types: dict[str, PointType], run: RunFacts) -> None:
        ids = {name: Column((), torch.int32) for name in IDS}
        columns = ids | {name: _column(name, types[name]) for name in self._points}
        for name, column in self._columns.items():
            if columns[name] != column:
                raise ValueError(
                    f"points: {name} is {column} in some runs and {columns[name]} in {run.run_id!r}: "
                    "choose runs of one model and dtype, by session or runs"
                )
        self._columns = columns

    def _add(self, message: Message, file: int, run: int, positions: Sequence[int]) -> None:
        """Add those of a batch's rows that are of such tokens, in blocks of rows that lie one behind the other."""
        batch = message.batch
        generated = batch["phase"].indices.to_numpy() == PHASES.index("generated")
        kinds = np.where(_within(batch["position"].to_numpy(), positions), generated, -1)
        offsets = np.array([_offset(batch[name], message.end) for name in self._columns])
        widths = np.array([column.width for column in self._columns.values()])
        firsts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist()]
        for first, end in zip(firsts, [*firsts[1:], len(kinds)], strict=True):
            if kinds[first] >= 0:
                begin = (offsets + first * widths).tolist()
                self._blocks.append(_Block(file, run, bool(kinds[first]), end - first, begin))


def _within(values: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    """Which values are among ascending positions, bool `[n]`."""
    if isinstance(positions, range):
        return (values >= positions.start) & (values < positions.stop)
    return np.isin(values, positions)


def _column(name: str, kind: PointType) -> Column:
    shape = tuple(size for size in kind.shape if size is not None)
    if len(shape) < len(kind.shape):
        raise ValueError(f"points: {name} is an attention pattern, whose rows grow and fit no batch: use load")
    return Column(shape, dtype_of(kind.dtype))


def _offset(column: Any, end: int) -> int:
    """The byte of its file where a column's values begin, of a batch that ends there."""
    values = (column.storage.flatten() if isinstance(column, pa.ExtensionArray) else column).buffers()[1]
    body = values
    while body.parent is not None:
        body = body.parent  # the batch's body as it was read at once
    return int(end - body.size + values.address - body.address)


def place(block: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Rows by block and number within the block, in one number, int64: what is added to it counts rows."""
    return np.asarray((block.astype(np.int64) << _WITHIN) + within)


def at(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `place`."""
    return places >> _WITHIN, places & ((1 << _WITHIN) - 1)


def blocks_between(starts: np.ndarray, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Rows in order, as (block, first row of it, rows)."""
    block = int(np.searchsorted(starts, first, side="right")) - 1
    while first < end:
        until = min(end, int(starts[block + 1]))
        yield block, first - int(starts[block]), until - first
        first, block = until, block + 1
