"""Runs as named tensors that are read row by row: what files of tensors are made of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from deployments.activations.facts import PointType
from deployments.activations.files.bodies import Part
from deployments.activations.reader.stored_rows import rows_of, values_at
from deployments.activations.segments.schema import dtype_of
from deployments.activations.segments.segments import Batch, WholeRun
from deployments.errors import RequestError
from deployments.points.patterns import Patterns

MOST_TENSORS = 20_000  # of one file, whose names stand in one header
FACTS = "run.facts"  # no point's name: those with a dot end in `input`, `output` or `weights`
_PADDED_ROWS = 16  # of an attention pattern that are in memory at once
_VALUES = 1 << 18  # that are converted at once


class Rows(NamedTuple):
    """Some rows of a tensor, and what reads those from one to before another: `read(first, end)`."""

    number: int
    read: Callable[[int, int], torch.Tensor]


class Member(NamedTuple):
    """A tensor that is read part by part.

    Attributes:
        name: What it is called.
        dtype: That its values are given in.
        shape: `[rows, ...features]`.
        rows: All of them, in order.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Sequence[Rows]

    @property
    def values(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes they are."""
        return self.values * self.dtype.itemsize

    def parts(self) -> list[Part]:
        """Its bytes."""
        width = self.nbytes // self.shape[0]
        return [Part(rows.number * width, partial(_bytes, rows, self.dtype, width)) for rows in self.rows]

    def widened(self) -> Member:
        """The same values in a dtype that numpy has: bfloat16 as float32, which holds each of them exactly."""
        return self._replace(dtype=torch.float32) if self.dtype == torch.bfloat16 else self


class Tensors(NamedTuple):
    """What one file holds: tensors, and what the runs are that they are of, as JSON by name."""

    members: list[Member]
    facts: dict[str, str]


def points_of(run: WholeRun, prefix: str = "") -> list[Member]:
    """A run's points as tensors `[rows, ...features]`, each by its name.

    An attention pattern is padded: `[rows, heads, widest]` with zeros behind what a token sees, and beside it, as
    `<name>.lengths`, how many tokens each row's token sees.
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
            rows = [Rows(batch.num_rows, partial(rows_of, batch, name, kind)) for batch in run.batches]
            members.append(Member(prefix + name, dtype, shape, rows))
    return members


def tensors(runs: Iterable[WholeRun], prefixed: bool) -> Tensors:
    """Runs as named tensors: their points, and each row's `position` and `token_id`.

    Args:
        runs: The runs.
        prefixed: Whether each name begins with its run's id and a slash, as those of several runs have to.

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
    """A column of int32, `[rows]`, and so much more."""

    def read(batch: Batch, first: int, end: int) -> torch.Tensor:
        return from_dlpack(batch[column])[first:end] + more

    rows = [Rows(batch.num_rows, partial(read, batch)) for batch in run.batches]
    return Member(member, torch.int32, (run.rows,), rows)


def _patterns(run: WholeRun, name: str, kind: PointType, widest: int) -> Iterator[Rows]:
    for batch in run.batches:
        for start in range(0, batch.num_rows, _PADDED_ROWS):
            yield Rows(min(_PADDED_ROWS, batch.num_rows - start), partial(_padded, batch, name, kind, widest, start))


def _padded(batch: Batch, name: str, kind: PointType, widest: int, start: int, first: int, end: int) -> torch.Tensor:
    """Rows of a pattern from `start + first` to `start + end`, `[rows, heads, widest]`."""
    rows, dtype, (heads, _) = batch.outline([name, "position"]), dtype_of(kind.dtype), kind.shape
    begins, ends = (rows[name].offsets[start + row].as_py() * dtype.itemsize for row in (first, end))
    position = rows["position"][0].as_py() + start
    values = values_at(batch, batch.place(rows[name]) + begins, ends - begins, dtype)
    some = Patterns(values, heads or 0, range(position + first, position + end)).padded()
    return torch.nn.functional.pad(some, (0, widest - some.shape[-1]))


def _bytes(rows: Rows, dtype: torch.dtype, width: int, first: int, end: int) -> Iterator[memoryview]:
    """Bytes of rows of a width as values of a dtype; only rows that they are of are read."""
    low = first // width
    skipped, left = first - low * width, end - first
    for some in torch.split(rows.read(low, -(-end // width)).contiguous().reshape(-1), _VALUES):
        if skipped >= some.numel() * dtype.itemsize:
            skipped -= some.numel() * dtype.itemsize
            continue
        piece = some.to(dtype).view(torch.uint8).numpy().data[skipped:][:left]
        yield piece
        skipped, left = 0, left - len(piece)
        if not left:
            return
