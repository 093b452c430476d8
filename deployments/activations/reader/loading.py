"""Reads stored activations as torch tensors, from files that are sealed, still open or truncated."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from deployments.activations.facts import PointType, RunFacts, SegmentFacts
from deployments.activations.files.places import DamagedError, Source, source_of
from deployments.activations.reader.sources import find_runs, is_run_id, locate, segments
from deployments.activations.segments.batches import Batch
from deployments.activations.segments.checksums import damaged
from deployments.activations.segments.columns import to_patterns, to_tensor
from deployments.activations.segments.schema import segment_facts
from deployments.activations.segments.segments import WholeRun, whole_runs
from deployments.points.names import COLUMNS, recorded
from deployments.points.patterns import Patterns


@dataclass(frozen=True, eq=False, repr=False)
class Run(Mapping[str, Any]):
    """One stored run: point name to tensor `[rows, ...features]`, one row per captured token.

    Attention patterns come as `Patterns`: a sequence of tensors `[heads, tokens seen]`, one for each captured token.
    Tensors of a run of one batch lie over a private map of the file if they are large; others are copies. Writing to
    them is allowed and never reaches the file.
    """

    facts: RunFacts
    segment: SegmentFacts  # what it shares with the other runs of its file
    positions: torch.Tensor  # each row's index in prompt + generated, int32 `[rows]`
    token_ids: torch.Tensor  # int32 `[rows]`
    text_offsets: torch.Tensor | None  # characters of prompt + generated text before each token, int32 `[rows]`
    phases: list[str]  # each row's, `"prompt"` or `"generated"`
    tensors: dict[str, torch.Tensor | Patterns]

    def __getitem__(self, point: str) -> Any:
        return self.tensors[point]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Run({self.facts.run_id!r}, rows={len(self.positions)}, points={list(self.tensors)})"


def load(
    source: str | os.PathLike[str] | Source,
    run_id: str | None = None,
    points: Sequence[str] | None = None,
    *,
    offset: int = 0,
    verify: bool = False,
    root: str | os.PathLike[str] | None = None,
) -> Run:
    """Load one run.

    `source` is a `file://` URI or path of one file, or of a session's directory; or the id of a run, which is looked
    for in `root`: the store's directory or URI, or the `http` address of a server, by default the variable
    `VITRINE_ACTIVATIONS`, or where a server of this machine stores. `run_id` may be left out where the source holds
    only one run. `points` come in this order, as `names.recorded` reads them: `layers.*.output`, `resid_post`,
    `layers.-1.output`. `offset` is where in a file the run begins, as lists of runs say it: nothing before it is looked
    at. `verify` reads all of it and compares checksums.

    ValueError, which lists what there is, if no one run is meant, or it has no such point; a DamagedError, which names
    points, if values lie outside of the file or are not those that were written. FileNotFoundError if the source does
    not exist.
    """
    if is_run_id(source) and run_id in (None, source):
        run_id = str(source)
        _, source, offset = locate(run_id, root)
    place = source_of(source)
    matching = _matching(place, run_id, offset)
    found = next(matching, None)
    if found is None or (run_id is None and not offset and next(matching, None)):
        some = ", ".join(islice((run.facts.run_id for run in _matching(place)), 5))
        wanted = "one run" if run_id is None else f"run {run_id!r}"
        raise ValueError(f"{place} does not hold {wanted}; it holds {some or 'no whole run'}: name one as run_id")
    segment = segment_facts(found.batches[0].schema)
    try:
        names = list(found.types) if points is None else recorded(points, found.types, segment.layers)
    except ValueError as error:
        raise ValueError(f"Run {found.facts.run_id!r}: {error}") from error
    columns = [name for name in found.batches[0].schema.names if name in COLUMNS or name in names]
    batches = [batch.select(columns) for batch in found.batches]
    if verify:
        _check(found, batches, names)
    has_offsets = "text_offset" in columns and not any(batch["text_offset"].null_count for batch in batches)
    return Run(
        facts=found.facts,
        segment=segment,
        positions=column_of(batches, "position"),
        token_ids=column_of(batches, "token_id"),
        text_offsets=column_of(batches, "text_offset") if has_offsets else None,
        phases=[phase for batch in batches for phase in batch["phase"].to_pylist()],
        tensors={name: _values(name, found.types[name], batches) for name in names},
    )


def values_of(run: WholeRun, point: str) -> torch.Tensor | Patterns:
    """A run's values at a point, `[rows, ...features]`; DamagedError if they are not all there."""
    return _values(point, run.types[point], [batch.select(["position", point]) for batch in run.batches])


def column_of(batches: Iterable[pa.RecordBatch | Batch], name: str) -> torch.Tensor:
    """An int32 column without nulls, `[rows]`."""
    return _join([from_dlpack(batch[name]) for batch in batches])


def _check(run: WholeRun, batches: Sequence[pa.RecordBatch], points: Sequence[str]) -> None:
    bad = dict[str, None]()
    if not run.intact:
        raise DamagedError(f"run {run.facts.run_id}: its description (such as its tags) is not what was written")
    for batch, sums in zip(batches, run.sums, strict=True):
        bad |= dict.fromkeys(damaged(batch, {name: sums[name] for name in batch.schema.names if name in sums}))
    if bad:
        good = [name for name in points if name not in bad]
        message = f"run {run.facts.run_id}: the values of {', '.join(bad)} are not those that were written"
        raise DamagedError(f"{message}; {', '.join(good) or 'none of the others'} can be read")


def runs(source: str | os.PathLike[str]) -> list[RunFacts]:
    """The whole runs of a file or directory (as for `load`), in the order of their requests and of their choices."""
    found = (run.facts for run in _matching(source_of(source)))
    return sorted(found, key=lambda facts: facts.created)


def _matching(place: Source, run_id: str | None = None, offset: int = 0) -> Iterator[WholeRun]:
    """The whole runs of a file or directory, or those of this id: by a catalogue or a manifest where one says where."""
    if run_id is not None and not offset and len(found := find_runs(place, [run_id])) == 1:
        _, place, offset = found[0]
    files = segments(place)
    if offset and files != [place]:
        raise ValueError(f"offset is a place in one file, and {place} is a directory")
    for file in files:
        yield from (run for run in whole_runs(file, offset) if run_id in (None, run.facts.run_id))


def _values(name: str, kind: PointType, batches: Sequence[pa.RecordBatch]) -> torch.Tensor | Patterns:
    if None not in kind.shape:
        return _join([to_tensor(batch[name], kind.dtype) for batch in batches])
    return Patterns.joined([to_patterns(batch[name], kind, batch["position"][0].as_py()) for batch in batches])


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
