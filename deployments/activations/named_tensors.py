"""Runs as named tensors that are read part by part: what files of tensors are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from deployments.activations.facts import PointType
from deployments.activations.schema import dtype_of, to_patterns, to_tensor
from deployments.activations.selecting import Chosen
from deployments.errors import RequestError

MOST_TENSORS = 20_000  # of one file, whose names stand in one header
FACTS = "run.facts"  # no point's name: those with a dot end in `input`, `output` or `weights`
_PADDED_ROWS = 16  # of an attention pattern that are in memory at once


class Member(NamedTuple):
    """A tensor that is read part by part.

    Attributes:
        name: What it is called.
        dtype: Of its values.
        shape: `[rows, ...features]`.
        parts: Begins to read it, some rows at a time.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[torch.Tensor]]

    @property
    def values(self) -> int:
        """How many values it has."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """How many bytes they are."""
        return self.values * self.dtype.itemsize

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes."""
        return (part.contiguous().reshape(-1).view(torch.uint8).numpy().data for part in self.parts())

    def widened(self) -> Member:
        """The same values in a dtype that numpy has: bfloat16 as float32, which holds each of them exactly."""
        if self.dtype != torch.bfloat16:
            return self
        return self._replace(dtype=torch.float32, parts=lambda: (part.float() for part in self.parts()))


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
            members.append(Member(prefix + name, dtype, shape, partial(_patterns, run, name, kind, widest)))
            members.append(Member(f"{prefix}{name}.lengths", torch.int32, (run.rows,), partial(_lengths, run)))
        else:
            members.append(Member(prefix + name, dtype, shape, partial(_rows, run, name, kind)))
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
            Member(f"{prefix}{name}", torch.int32, (run.rows,), partial(_column, run, name))
            for name in ("position", "token_id")
        ]
        dtypes = {name: kind.dtype for name, kind in run.types.items()}
        facts[prefix + FACTS] = json.dumps(asdict(run.facts) | {"dtypes": dtypes})
        if len(members) > MOST_TENSORS:
            message = f"more than {MOST_TENSORS} tensors in one file: name fewer runs or points, or take arrow"
            raise RequestError(message, "format", "too_many_tensors")
    return Tensors(members, facts)


def _rows(run: Chosen, name: str, kind: PointType) -> Iterator[torch.Tensor]:
    return (to_tensor(batch[name], kind.dtype) for batch in run.batches)


def _column(run: Chosen, name: str) -> Iterator[torch.Tensor]:
    return (from_dlpack(batch[name]) for batch in run.batches)


def _lengths(run: Chosen) -> Iterator[torch.Tensor]:
    return (positions + 1 for positions in _column(run, "position"))


def _patterns(run: Chosen, name: str, kind: PointType, widest: int) -> Iterator[torch.Tensor]:
    for batch in run.batches:
        rows = to_patterns(batch[name], kind, batch["position"][0].as_py())
        for first in range(0, len(rows), _PADDED_ROWS):
            some = rows[first : first + _PADDED_ROWS].padded()
            yield torch.nn.functional.pad(some, (0, widest - some.shape[-1]))
