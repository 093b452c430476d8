"""An index of the rows of stored runs: file and byte of each, so that any row can be read without Arrow."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from deployments.activations.facts import PointType, RunFacts
from deployments.activations.reader.selection import Wanted, checked
from deployments.activations.reader.sources import chosen, on_disk
from deployments.activations.reader.stored_rows import positions_of
from deployments.activations.segments.batches import Batch
from deployments.activations.segments.columns import DTYPES
from deployments.activations.segments.schema import PHASES
from deployments.activations.segments.segments import WholeRun
from deployments.points.token_choices import TokenChoice, check

Chosen = TokenChoice | Mapping[str, Any]  # which tokens, as in a request
IDS = ("position", "token_id")  # columns of one int32 a row


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

    A block is rows that lie one after the other: of one run, one phase and one record batch.
    """

    paths: list[Path]
    runs: list[RunFacts]  # their interventions and texts, which may be large, are left to the files
    columns: dict[str, Column]  # `position`, `token_id`, and each point by its name
    file: np.ndarray  # each block's, an index of `paths`, `[blocks]`
    run: np.ndarray  # each block's, an index of `runs`, `[blocks]`
    generated: np.ndarray  # whether a block's tokens were generated, else they are the prompt's, `[blocks]`
    starts: np.ndarray  # each block's first row, and at the end how many rows there are, `[blocks + 1]`
    offsets: np.ndarray  # the byte of its file where a block's values of a column begin, `[columns, blocks]`

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all columns."""
        return sum(column.width for column in self.columns.values())

    @property
    def ends(self) -> np.ndarray:
        """As `offsets`, the byte after a block's values of a column."""
        widths = np.array([column.width for column in self.columns.values()])
        ends: np.ndarray = self.offsets + widths[:, None] * np.diff(self.starts)
        return ends


def index_rows(
    source: str | os.PathLike[str],
    points: Sequence[str],
    *,
    session: str | None = None,
    runs: Collection[str] | None = None,
    tokens: Chosen = "all",
) -> RowIndex:
    """Look through files once, for the rows of such points and tokens; of a run's tensors nothing is read.

    `source` is a store's or session's directory, or one file, as a path or URI; or the id of a run. Files in a bucket
    are first copied to a temporary directory, since rows are read out of maps. `points` are read as by
    `names.recorded`; a pattern means what the first run with any such point recorded. Runs that did not record them all
    are left out. `session` and `runs` limit the runs; `tokens` is `all`, `prompt`, `prompt_last`, `{"last": 3}`,
    `{"text": "France"}` and so on, as `token_choices` defines it.

    RequestError, a ValueError, if there is no such run or point. ValueError if no point is named, one is an attention
    pattern, differs in shape or dtype from run to run, or was not recorded by a run that `runs` names; or if no row is
    left. FileNotFoundError if there is no such source or session, ElsewhereError if runs of it lie on other nodes.
    """
    if isinstance(points, str) or not points:
        raise ValueError("points: name at least one, as a list")
    choice = check(tokens)
    files, wanted = chosen(source, session, runs)
    named, recorded = list(dict.fromkeys(points)), set[str]()
    found = _Found(named, wanted.runs is not None)
    for _, of_file in groupby(checked(on_disk(files), wanted), key=lambda run: run.file):
        recorded |= set((first := next(of_file)).types)
        if found.has_all(first):  # all runs of a file have the same points
            for run in chain([first], of_file):
                found.add(run, choice)
    if found.lacking and wanted.runs is not None and found.blocks:
        raise ValueError(found.lacking)
    Wanted(points=named).check((), recorded)
    return found.index()


_Block = tuple[int, int, bool, int, list[int]]  # as in `RowIndex`: file, run, generated, rows and offsets


class _Found:
    """The rows of runs that were looked at, and what the first run without all of the points lacks."""

    def __init__(self, points: list[str], are_named: bool) -> None:
        self.lacking = ""
        self.blocks = list[_Block]()
        self._points = points  # as they were named, until a file has them all
        self._are_named = are_named  # whether each run has to have the points
        self._columns: dict[str, Column] = {}
        self._paths, self._runs = list[Path](), list[RunFacts]()

    def add(self, run: WholeRun, choice: TokenChoice) -> None:
        """Add the rows of such tokens of a run that has all of the points."""
        self._runs.append(replace(run.facts, interventions=[], text=None))
        positions = positions_of(run, choice, "tokens")
        for batch in run.batches:
            self._add(batch, positions)

    def index(self) -> RowIndex:
        """All of it."""
        if not self.blocks:
            raise ValueError(f"points, tokens: no run has rows of {', '.join(self._points)} for such tokens")
        file, run, generated, rows, offsets = (np.array(each) for each in zip(*self.blocks, strict=True))
        starts = np.concatenate([[0], np.cumsum(rows)])
        return RowIndex(self._paths, self._runs, self._columns, file, run, generated, starts, offsets.T.copy())

    def has_all(self, run: WholeRun) -> bool:
        """Whether the runs of a file, of which this is the first, have all of the points; ValueError on a misfit."""
        schema = None if self._columns else run.batches[0].schema  # of which patterns are resolved
        meant = {
            name: [name] if name in run.types else [*Wanted(points=[name]).of(schema)] if schema else []
            for name in self._points
        }
        if lacking := [name for name in self._points if not meant[name]]:
            self.lacking = self.lacking or f"runs: {run.facts.run_id!r} did not record {', '.join(lacking)}"
            if self._are_named and len(lacking) < len(self._points):
                raise ValueError(self.lacking)
            return False
        self._points = list(dict.fromkeys(name for names in meant.values() for name in names))
        columns = dict.fromkeys(IDS, Column((), torch.int32))
        columns |= {name: _column(name, run.types[name]) for name in self._points}
        for name, column in self._columns.items():
            if columns[name] != column:
                raise ValueError(
                    f"points: {name} is {column} in some runs and {columns[name]} in {run.facts.run_id!r}: "
                    "choose runs of one model and dtype, by session or runs"
                )
        self._columns = columns
        self._paths += [run.file.local] if run.file.local else []
        return True

    def _add(self, batch: Batch, positions: Sequence[int]) -> None:
        """Add those of a batch's rows that are of such tokens, in blocks of rows that lie one after the other."""
        rows = batch.select(["phase", *self._columns])
        generated = rows["phase"].indices.to_numpy() == PHASES.index("generated")
        at = rows["position"].to_numpy()
        if isinstance(positions, range):
            taken = (at >= positions.start) & (at < positions.stop)
        else:
            taken = np.isin(at, positions)
        kinds = np.where(taken, generated, -1)
        widths = np.array([column.width for column in self._columns.values()])
        offsets = np.array([batch.place(rows[name], column.width) for name, column in self._columns.items()])
        firsts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist()]
        for first, end in zip(firsts, [*firsts[1:], len(kinds)], strict=True):
            if kinds[first] >= 0:
                begin, is_generated = (offsets + first * widths).tolist(), bool(kinds[first])
                self.blocks.append((len(self._paths) - 1, len(self._runs) - 1, is_generated, end - first, begin))


def _column(name: str, kind: PointType) -> Column:
    shape = tuple(size for size in kind.shape if size is not None)
    if len(shape) < len(kind.shape):
        raise ValueError(f"points: {name} is an attention pattern, whose rows grow and do not fit a batch: use load")
    return Column(shape, DTYPES[kind.dtype])


def blocks_between(starts: np.ndarray, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Rows in order, as (block, first row of it, rows)."""
    block = int(np.searchsorted(starts, first, side="right")) - 1
    while first < end:
        until = min(end, int(starts[block + 1]))
        yield block, first - int(starts[block]), until - first
        first, block = until, block + 1
