"""Runs as one file of named tensors: safetensors, npz or pt."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from deployments.activations.reader.loading import column_of, values_of
from deployments.activations.segments.columns import DTYPES
from deployments.activations.segments.segments import WholeRun
from deployments.errors import RequestError
from deployments.points.patterns import Patterns

MOST_TENSORS = 20_000  # of one file, whose names are in one header
FACTS = "run.facts"  # no point's name: those with a dot end in `input`, `output` or `weights`


class Member(NamedTuple):
    """A tensor of a file; `make` reads its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The values for numpy, which has no bfloat16: float32."""
        values = self.make()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


class Tensors(NamedTuple):
    """The content of one file: tensors, and by name the runs' facts as JSON."""

    members: list[Member]
    facts: dict[str, str]


def points_of(run: WholeRun, prefix: str = "") -> list[Member]:
    """A run's points as tensors `[rows, ...features]`, their names prefixed.

    An attention pattern is padded with zeros to `[rows, heads, widest]`; `<name>.lengths` says how many tokens each
    row's token sees.
    """
    members, widest = list[Member](), int(run.batches[-1]["position"][-1].as_py()) + 1
    for name, kind in run.types.items():
        shape = (run.rows, *(widest if size is None else size for size in kind.shape))
        members.append(Member(prefix + name, DTYPES[kind.dtype], shape, partial(_dense, run, name)))
        if None in kind.shape:
            members.append(_ids(run, f"{prefix}{name}.lengths", "position", 1))
    return members


def tensors(runs: Iterable[WholeRun], prefixed: bool) -> Tensors:
    """Runs as named tensors, perhaps `prefixed` by run: points, `position`, `token_id`; RequestError if too many."""
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


def _dense(run: WholeRun, name: str) -> torch.Tensor:
    values = values_of(run, name)
    return values.padded() if isinstance(values, Patterns) else values


def _ids(run: WholeRun, member: str, column: str, more: int = 0) -> Member:
    """An int32 column `[rows]`, plus `more`."""
    return Member(member, torch.int32, (run.rows,), lambda: column_of(run.batches, column) + more)


def write_safetensors(found: Tensors, file: IO[bytes]) -> None:
    """Write a safetensors file tensor by tensor; the facts are its metadata."""
    # The widest values first, as safetensors' own writer orders them, so that each tensor is aligned.
    members = sorted(found.members, key=lambda member: -member.dtype.itemsize)
    ends = [*accumulate((math.prod(member.shape) * member.dtype.itemsize for member in members), initial=0)]
    header: dict[str, object] = {"__metadata__": found.facts}
    for i, (name, dtype, shape, _) in enumerate(members):
        kind = "BF" if dtype == torch.bfloat16 else "F" if dtype.is_floating_point else "I"
        header[name] = {"dtype": f"{kind}{8 * dtype.itemsize}", "shape": shape, "data_offsets": ends[i : i + 2]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for member in members:
        file.write(member.make().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_npz(found: Tensors, file: IO[bytes]) -> None:
    """Write what `numpy.load` reads. bfloat16 becomes float32, as numpy has none; the facts give points' own dtypes."""
    # numpy makes one array after the other, and dates all to 1980-01-01: the same runs give the same bytes.
    arrays: dict[str, Any] = {member.name: member for member in found.members} | found.facts
    np.savez(file, **arrays)


def write_pt(found: Tensors, file: IO[bytes]) -> None:
    """Write what `torch.load` reads: a dict of the tensors, each `[1, rows, ...features]`, and of the facts."""
    torch.save({member.name: member.make()[None] for member in found.members} | found.facts, file)


WRITERS = {"safetensors": write_safetensors, "npz": write_npz, "pt": write_pt}
"""By format, what writes one file of named tensors."""
