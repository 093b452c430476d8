"""Reads stored activations as torch tensors, from files that are sealed, still written to or cut short."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from deployments.activations.facts import FileInfo, RunInfo
from deployments.activations.reader.sources import files_of, find, is_run_id, locate, segments
from deployments.activations.segments.columns import to_patterns, to_tensor
from deployments.activations.segments.schema import file_info
from deployments.activations.segments.segments import Batch, DamagedError, RunBatches, whole_runs
from deployments.points.names import COLUMNS, recorded
from deployments.points.patterns import Patterns
from deployments.points.token_choices import ROLES


@dataclass(frozen=True, eq=False, repr=False)
class Run(Mapping[str, Any]):
    """One stored run: point name to tensor `[rows, ...features]`, one row per captured token.

    Attention patterns come as `Patterns`: a sequence of tensors `[heads, tokens seen]`, one for each captured token.
    Tensors of a run of one batch lie over a private map of the file if they are large; others are copies. Writing to
    them is allowed and never reaches the file.
    """

    facts: RunInfo
    segment: FileInfo  # what it shares with the other runs of its file
    positions: torch.Tensor  # each row's index in prompt + generated, int32 `[rows]`
    token_ids: torch.Tensor  # int32 `[rows]`
    text_offsets: torch.Tensor | None  # characters of prompt + generated text before each token, int32 `[rows]`
    phases: list[str]  # each row's, `"prompt"` or `"generated"`
    roles: list[str] | None  # each row's, one of `token_choices.ROLES`; None where the run is not of a chat
    tensors: dict[str, torch.Tensor | Patterns]

    def __getitem__(self, point: str) -> Any:
        return self.tensors[point]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Run({self.facts.run_id!r}, rows={len(self.positions)}, points={list(self.tensors)})"


def read_run(
    source: str | os.PathLike[str],
    run_id: str | None = None,
    points: Sequence[str] | None = None,
    *,
    offset: int = 0,
    verify: bool = False,
    root: str | os.PathLike[str] | None = None,
) -> Run:
    """Read one run, as views of its file where possible.

    `source` is a path or URI of one file, or of the directory of a session, an owner or a store, on this machine or in
    a bucket; or the id of a run, which is looked for in `root`: the store's directory or URI, or the `http` address of
    a server, by default the variable `VITRINE_ACTIVATIONS`, or where a server of this machine stores. `run_id` may be
    left out where the source holds only one run. `points` come in this order, as `names.recorded` reads them:
    `layers.*.output`, `resid_post`, `layers.-1.output`. `offset` is where in a file the run begins, as lists of runs
    say it: nothing before it is looked at. `verify` reads all of it and compares checksums.

    ValueError, which lists what there is, if no one run is meant, or it has no such point; a DamagedError if values lie
    outside of the file or, with `verify`, are not those that were written. FileNotFoundError if the source does
    not exist.
    """
    if is_run_id(source) and run_id in (None, source):
        run_id = str(source)
        source, offset = locate(run_id, root)
    matching = _matching(source, run_id, offset)
    run = next(matching, None)
    if run is None or (run_id is None and not offset and next(matching, None)):
        held_ids = ", ".join(islice((other.facts.run_id for other in _matching(source)), 5))
        held, wanted = os.fspath(source).partition("?")[0], "one run" if run_id is None else f"run {run_id!r}"
        raise ValueError(f"{held} does not hold {wanted}; it holds {held_ids or 'no whole run'}: name one as run_id")
    segment = file_info(run.batches[0].schema)
    try:
        names = list(run.types) if points is None else recorded(points, run.types, segment.layers)
    except ValueError as error:
        raise ValueError(f"Run {run.facts.run_id!r}: {error}") from error
    if verify and (bad := run.damage()):
        raise DamagedError(f"run {run.facts.run_id}: {', '.join(bad)} is not as it was written")
    batches = _filled(run, COLUMNS)
    has_offsets = not any(batch["text_offset"].null_count for batch in batches)
    roles = [role for batch in batches for role in batch["role"].to_pylist()]
    return Run(
        facts=run.facts,
        segment=segment,
        positions=column_of(batches, "position"),
        token_ids=column_of(batches, "token_id"),
        text_offsets=column_of(batches, "text_offset") if has_offsets else None,
        phases=[phase for batch in batches for phase in batch["phase"].to_pylist()],
        roles=None if None in roles else [ROLES[role] for role in roles],
        tensors={name: values_of(run, name) for name in names},
    )


def values_of(run: RunBatches, point: str) -> torch.Tensor | Patterns:
    """A run's values at a point, `[rows, ...features]`; DamagedError if they are not all there."""
    kind, batches = run.types[point], _filled(run, ["position", point])
    if None not in kind.shape:
        return _join([to_tensor(batch[point], kind.dtype) for batch in batches])
    return Patterns.joined([to_patterns(batch[point], kind, batch["position"][0].as_py()) for batch in batches])


def column_of(batches: Iterable[pa.RecordBatch | Batch], name: str) -> torch.Tensor:
    """An int32 column without nulls, `[rows]`."""
    return _join([from_dlpack(batch[name]) for batch in batches if batch.num_rows])


def runs(source: str | os.PathLike[str]) -> list[RunInfo]:
    """The whole runs of a file or directory, as for `read_run`, in the order of their requests and their choices."""
    every = (run.facts for path in segments(source) for run in whole_runs(path))
    return sorted(every, key=lambda facts: facts.created)


def _matching(source: str | os.PathLike[str], run_id: str | None = None, offset: int = 0) -> Iterator[RunBatches]:
    """The whole runs of a source, or those of this id; `offset` is where in a file to start."""
    if run_id is not None and not offset:
        return find(source, run_id)
    runs = (run for file in files_of(source) for run in whole_runs(file.here(), offset))
    return (run for run in runs if run_id in (None, run.facts.run_id))


def _filled(run: RunBatches, columns: Sequence[str]) -> list[pa.RecordBatch]:
    """These columns of the batches of a run that have rows."""
    return [batch.select(columns) for batch in run.batches if batch.num_rows]


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
