"""Runs as named tensors whose bytes are read on demand: the content of npz, pt and safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from deployments.activations.export.parts import Part
from deployments.activations.facts import PointType
from deployments.activations.reader.stored_rows import rows_of, values_at
from deployments.activations.segments.batches import Batch
from deployments.activations.segments.schema import dtype_of
from deployments.activations.segments.segments import WholeRun
from deployments.errors import RequestError
from deployments.points.patterns import Patterns

MOST_TENSORS = 20_000  # of one file, whose names are in one header
FACTS = "run.facts"  # no point's name: those with a dot end in `input`, `output` or `weights`
_PADDED_ROWS = 16  # of an attention pattern that are in memory at once
_VALUES = 1 << 18  # that are converted at once

Rows = tuple[int, Callable[[int, int], torch.Tensor]]
"""How many rows, and `read(first, end)`, which gives those from `first` to `end`."""


class Member(NamedTuple):
    """A tensor `[rows, ...features]` of which ranges of rows are read."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: list[Rows]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def parts(self) -> list[Part]:
        """Its bytes, in its dtype."""
        width = self.nbytes // self.shape[0]
        return [Part(count * width, partial(_bytes, read, self.dtype, width)) for count, read in self.rows]


class Tensors(NamedTuple):
    """The content of one file: tensors, and by name the runs' facts as JSON."""

    members: list[Member]
    facts: dict[str, str]


def points_of(run: WholeRun, prefix: str = "") -> list[Member]:
    """A run's points as tensors `[rows, ...features]`, their names prefixed.

    An attention pattern is padded with zeros to `[rows, heads, widest]`; `<name>.lengths` says how many tokens each
    row's token sees.
    """
    members = list[Member]()
    for name, kind in run.types.items():
        dtype, shape = dtype_of(kind.dtype), (run.rows, *(size or 0 for size in kind.shape))
        if None in kind.shape:
            widest = run.batches[-1]["position"][-1].as_py() + 1
            padded = list(_patterns(run, name, kind, widest))
            members.append(Member(prefix + name, dtype, (*shape[:-1], widest), padded))
            members.append(_ids(run, f"{prefix}{name}.lengths", "position", 1))
        else:
            rows: list[Rows] = [(batch.num_rows, partial(rows_of, batch, name, kind)) for batch in run.batches]
            members.append(Member(prefix + name, dtype, shape, rows))
    return members


def tensors(runs: Iterable[WholeRun], prefixed: bool) -> Tensors:
    """Runs as named tensors: their points, and each row's `position` and `token_id`.

    Args:
        runs: The runs.
        prefixed: Whether names begin with the run's id and a slash, as they have to for several runs.

    Raises:
        RequestError: They are too many for one file.
    """
    members, facts = list[Member](), dict[str, str]()
    for run in runs:
        prefix = f"{run.facts.run_id}/" if prefixed else ""
        members += points_of(run, prefix)
        members += [_ids(run, prefix + name, name) for name in ("position", "token_id")]
        dtypes = {name: kind.dtype for name, kind in run.types.items()}
        facts[prefix + FACTS] = json.dumps(asdict(run.facts) | {"dtypes": dtypes})
        if len(members) > MOST_TENSORS:
            message = f"more than {MOST_TENSORS} tensors in one file: name fewer runs or points, or take arrow"
            raise RequestError(message, "format", "too_many_tensors")
    return Tensors(members, facts)


def _ids(run: WholeRun, member: str, column: str, more: int = 0) -> Member:
    """An int32 column `[rows]`, plus `more`."""

    def read(batch: Batch, first: int, end: int) -> torch.Tensor:
        return from_dlpack(batch[column])[first:end] + more

    return Member(member, torch.int32, (run.rows,), [(batch.num_rows, partial(read, batch)) for batch in run.batches])


def _patterns(run: WholeRun, name: str, kind: PointType, widest: int) -> Iterator[Rows]:
    for batch in run.batches:
        for start in range(0, batch.num_rows, _PADDED_ROWS):
            yield min(_PADDED_ROWS, batch.num_rows - start), partial(_padded, batch, name, kind, widest, start)


def _padded(batch: Batch, name: str, kind: PointType, widest: int, start: int, first: int, end: int) -> torch.Tensor:
    """Rows `start + first` to `start + end` of a pattern, `[rows, heads, widest]`."""
    rows, dtype, (heads, _) = batch.outline([name, "position"]), dtype_of(kind.dtype), kind.shape
    begins, ends = (rows[name].offsets[start + row].as_py() * dtype.itemsize for row in (first, end))
    position = rows["position"][0].as_py() + start
    values = values_at(batch, batch.place(rows[name]) + begins, ends - begins, dtype)
    some = Patterns(values, heads or 0, range(position + first, position + end)).padded()
    return torch.nn.functional.pad(some, (0, widest - some.shape[-1]))


def _bytes(
    read: Callable[[int, int], torch.Tensor], dtype: torch.dtype, width: int, first: int, end: int
) -> Iterator[memoryview]:
    """Bytes `first` to `end` of rows of `width` bytes each, converted to a dtype; no other rows are read."""
    low = first // width
    skipped, left = first - low * width, end - first
    for some in torch.split(read(low, -(-end // width)).contiguous().reshape(-1), _VALUES):
        if skipped >= some.numel() * dtype.itemsize:
            skipped -= some.numel() * dtype.itemsize
            continue
        piece = some.to(dtype).view(torch.uint8).numpy().data[skipped:][:left]
        yield piece
        skipped, left = 0, left - len(piece)
        if not left:
            return
