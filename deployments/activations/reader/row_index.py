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

from deployments.activations.facts import RunInfo
from deployments.activations.reader.sources import Wanted, chosen, select
from deployments.activations.reader.stored_rows import positions_of
from deployments.activations.segments.columns import DTYPES
from deployments.activations.segments.schema import PHASES
from deployments.activations.segments.segments import Batch, RunBatches
from deployments.points.names import nearest
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
    runs: list[RunInfo]  # their interventions and texts, which may be large, are left to the files
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


def index_rows(
    source: str | os.PathLike[str],
    points: Sequence[str],
    *,
    session: str | None = None,
    runs: Collection[str] | None = None,
    tokens: Chosen = "all",
) -> RowIndex:
    """Look through files once, for the rows of such points and tokens; of a run's tensors nothing is read.

    `source` is the directory of a store, an owner or a session, or one file, as a path or URI; or the id of a run.
    Files in a bucket are first copied to a temporary directory. `points` are read as by `names.recorded`; a pattern
    means what the first run with any such point recorded. Runs that did not record them all are left out. `session`
    and `runs` limit the runs; `tokens` is `all`, `prompt`, `prompt_last`, `{"last": 3}`, `{"text": "France"}` and so
    on, as `token_choices` defines it.

    RequestError, a ValueError, if there is no such run or point. ValueError if no point is named, one is an attention
    pattern, differs in shape or dtype from run to run, or was not recorded by a run that `runs` names; or if no row is
    left. FileNotFoundError if there is no such source or session.
    """
    if isinstance(points, str) or not points:
        raise ValueError("points: name at least one, as a list")
    choice = check(tokens)
    files, wanted = chosen(source, session, runs)
    names, recorded, columns = list(dict.fromkeys(points)), set[str](), dict[str, Column]()
    paths, runs_of_rows, blocks = list[Path](), list[RunInfo](), list[_Block]()
    for path, of_file in groupby(select(files, wanted), key=lambda run: run.path):
        first = next(of_file)  # all runs of a file have the same points
        recorded |= set(first.types)
        meant = {name: list(Wanted(points=[name]).of(first.batches[0].schema)) for name in names}
        if lacking := [name for name in names if not meant[name]]:
            if wanted.runs is not None:
                near = nearest(lacking[0], list(first.types))
                raise ValueError(f"runs: {first.facts.run_id!r} did not record {', '.join(lacking)}; there is {near}")
            continue
        names = list(dict.fromkeys(name for each in meant.values() for name in each))
        columns = _columns(first, names, columns)
        paths.append(path)
        for run in chain([first], of_file):
            runs_of_rows.append(replace(run.facts, interventions=[], text=None))
            positions = positions_of(run, choice, "tokens")
            for batch in run.batches:
                if batch.num_rows:
                    blocks += _blocks(batch, positions, columns, len(paths) - 1, len(runs_of_rows) - 1)
    Wanted(points=names).check((), recorded)
    if not blocks:
        raise ValueError(f"points, tokens: no run has rows of {', '.join(names)} for such tokens")
    file, run_of, generated, rows, offsets = (np.array(each) for each in zip(*blocks, strict=True))
    starts = np.concatenate([[0], np.cumsum(rows)])
    return RowIndex(paths, runs_of_rows, columns, file, run_of, generated, starts, offsets.T.copy())


_Block = tuple[int, int, bool, int, list[int]]  # as in `RowIndex`: file, run, generated, rows and offsets


def _columns(run: RunBatches, points: Sequence[str], before: Mapping[str, Column]) -> dict[str, Column]:
    """The columns of the rows of a run; ValueError if they are others than those of the runs before."""
    columns = dict.fromkeys(IDS, Column((), torch.int32))
    for name in points:
        shape, dtype = run.types[name]
        if None in shape:
            raise ValueError(f"points: {name} is an attention pattern, whose rows grow and fit no batch: use load")
        columns[name] = Column(tuple(size or 0 for size in shape), DTYPES[dtype])
        if before and columns[name] != before[name]:
            raise ValueError(
                f"points: {name} is {before[name]} in some runs and {columns[name]} in {run.facts.run_id!r}: "
                "choose runs of one model and dtype, by session or runs"
            )
    return columns


def _blocks(
    batch: Batch, positions: Sequence[int], columns: Mapping[str, Column], file: int, run: int
) -> Iterator[_Block]:
    """Those of a batch's rows that are of tokens at these positions, in blocks that lie one after the other."""
    rows = batch.select(["phase", *columns])
    generated = rows["phase"].indices.to_numpy() == PHASES.index("generated")
    kinds = np.where(np.isin(rows["position"].to_numpy(), positions), generated, -1)
    widths = np.array([column.width for column in columns.values()])
    offsets = np.array([batch.offset_of(rows[name], column.width) for name, column in columns.items()])
    firsts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist()]
    for first, end in zip(firsts, [*firsts[1:], len(kinds)], strict=True):
        if kinds[first] >= 0:
            yield file, run, bool(kinds[first]), end - first, (offsets + first * widths).tolist()
