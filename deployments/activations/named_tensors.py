"""Runs as named tensors that are read part by part: what files of tensors are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from deployments.activations.facts import PointType
from deployments.activations.messages import check_size
from deployments.activations.parts import Part
from deployments.activations.schema import dtype_of, to_patterns, to_tensor
from deployments.activations.selecting import Chosen
from deployments.errors import RequestError

MOST_TENSORS = 20_000  # of one file, whose names stand in one header
FACTS = "run.facts"  # no point's name: those with a dot end in `input`, `output` or `weights`
_PADDED_ROWS = 16  # of an attention pattern that are in memory at once
_VALUES = 1 << 18  # that are converted at once


class Rows(NamedTuple):
    """Some rows of a tensor, and what reads them."""

    number: int
    read: Callable[[], torch.Tensor]


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
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """How many bytes they are."""
        return self.values * self.dtype.itemsize

    def parts(self) -> list[Part]:
        """Its bytes."""
        row_bytes = self.nbytes // self.shape[0]
        return [Part(rows.number * row_bytes, partial(_bytes, rows, self.dtype)) for rows in self.rows]

    def widened(self) -> Member:
        """The same values in a dtype that numpy has: bfloat16 as float32, which holds each of them exactly."""
        return self._replace(dtype=torch.float32) if self.dtype == torch.bfloat16 else self


class Tensors(NamedTuple):
    """What one file holds: tensors, and what the runs are that they are of, as JSON by name."""

    members: list[Member]
    facts: dict[str, str]


def points_of(run: Chosen, prefix: str = "") -> list[Member]:
    """A run's points as tensors `[rows, ...features]`, each by its name.

    An attention pattern is padded: `[rows, heads, widest]` with zeros behind what a token sees, and beside it, as
    `<name>.lengths`, how many tokens each row's token sees.
    """
    members = list[Member]()
    for name, kind in run.types.items():
        dtype = dtype_of(kind.dtype)
        shape = (run.rows, *(size or 0 for size in kind.shape))
        if None in kind.shape:
            widest = run.batches[-1]["position"][-1].as_py() + 1
            shape = (*shape[:-1], widest)
            members.append(Member(prefix + name, dtype, shape, list(_patterns(run, name, kind, widest))))
            members.append(Member(f"{prefix}{name}.lengths", torch.int32, (run.rows,), _each(run, _lengths)))
        else:
            members.append(Member(prefix + name, dtype, shape, _each(run, _values, name, kind.dtype)))
    return members


def tensors(runs: Iterable[Chosen], prefixed: bool) -> Tensors:
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
        members += [
            Member(f"{prefix}{name}", torch.int32, (run.rows,), _each(run, _column, name))
            for name in ("position", "token_id")
        ]
        dtypes = {name: kind.dtype for name, kind in run.types.items()}
        facts[prefix + FACTS] = json.dumps(asdict(run.facts) | {"dtypes": dtypes})
        if len(members) > MOST_TENSORS:
            message = f"more than {MOST_TENSORS} tensors in one file: name fewer runs or points, or take arrow"
            raise RequestError(message, "format", "too_many_tensors")
    return Tensors(members, facts)


def _each(run: Chosen, read: Callable[..., torch.Tensor], *args: str) -> list[Rows]:
    """A run's rows, batch by batch."""
    return [Rows(batch.num_rows, _whole(run, partial(read, batch, *args))) for batch in run.batches]


def _whole(run: Chosen, read: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The same, where the run's file has not been cut short: to touch what is mapped of it would end the process."""

    def checked() -> torch.Tensor:
        check_size(run.file, run.end)
        return read()

    return checked


def _values(batch: pa.RecordBatch, name: str, dtype: str) -> torch.Tensor:
    return to_tensor(batch[name], dtype)


def _column(batch: pa.RecordBatch, name: str) -> torch.Tensor:
    return from_dlpack(batch[name])


def _lengths(batch: pa.RecordBatch) -> torch.Tensor:
    return _column(batch, "position") + 1


def _patterns(run: Chosen, name: str, kind: PointType, widest: int) -> Iterator[Rows]:
    for batch in run.batches:
        for first in range(0, batch.num_rows, _PADDED_ROWS):
            count = min(_PADDED_ROWS, batch.num_rows - first)
            yield Rows(count, _whole(run, partial(_padded, batch, name, kind, widest, first)))


def _padded(batch: pa.RecordBatch, name: str, kind: PointType, widest: int, first: int) -> torch.Tensor:
    rows = to_patterns(batch[name], kind, batch["position"][0].as_py())
    some = rows[first : first + _PADDED_ROWS].padded()
    return torch.nn.functional.pad(some, (0, widest - some.shape[-1]))


def _bytes(rows: Rows, dtype: torch.dtype, first: int, end: int) -> Iterator[memoryview]:
    """Bytes of rows as values of a dtype; only values that they are of are converted."""
    begins, ends = first // dtype.itemsize, -(-end // dtype.itemsize)
    skipped, left = first - begins * dtype.itemsize, end - first
    for some in torch.split(rows.read().contiguous().reshape(-1)[begins:ends], _VALUES):
        piece = some.to(dtype).view(torch.uint8).numpy().data[skipped:][:left]
        yield piece
        skipped, left = 0, left - len(piece)
