"""The stored rows that a census reads: at which points, of which layers, and in batches."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from deployments.activations.reader.row_index import index_rows
from deployments.activations.reader.row_reader import RowReader
from deployments.activations.reader.selection import by_schema
from deployments.activations.reader.sources import segments
from deployments.activations.segments.schema import point_types, segment_facts
from deployments.activations.segments.segments import whole_runs
from deployments.points.names import recorded
from evals.config import EvalError, some

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)")
# What attention's first projections and the MLP's read, by canonical names or the projections' own.
INPUTS = re.compile(
    r"layers\.\d+\.(?:(?:input|post_attention)_layernorm\.output|(?:attention|mlp)\.input)"
    r"|.+\.(?:[qkv]_proj|qkv_proj|query_key_value|c_attn|gate_proj|up_proj|gate_up_proj|dense_h_to_4h|c_fc|fc1)\.input"
)
RESIDUAL = re.compile(r"(?:.+\.)?(?:layers|h|blocks)\.\d+\.output")
BATCH_BYTES = 32 << 20  # of rows in memory at once, in the dtype that was stored


class Batch(NamedTuple):
    """Some rows, all of whose values are finite.

    Attributes:
        rows: Their numbers in the index, ascending, int64 `[rows]`.
        values: Of each point `[rows, features]`, in the dtype that was stored.
        tops: The largest magnitude of each row at each point, float64 `[points, rows]`.
        not_finite: How many further rows had a value that is not finite, and are left out.
    """

    rows: np.ndarray
    values: list[torch.Tensor]
    tops: np.ndarray
    not_finite: int


class Stored:
    """A session's rows at points of one width, of one model.

    Attributes:
        model: Its id.
        points: Their names, by layers.
        layer: Each point's layer, int64 `[points]`.
        width: Features of a row at a point.
        index: Where the rows lie.
        left_out: How many runs did not record all of the points.
        most: Rows of a batch.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        session: str,
        points: re.Pattern[str] | Sequence[str],
        option: str = "--points",
    ) -> None:
        """Look through the session's files; no value is read.

        Args:
            source: The store's directory.
            session: Which session.
            points: Names, in which `*` is any layer, or what names of points or modules match.
            option: What a refusal of points names.

        Raises:
            EvalError: Nothing fits, runs are of several models, or points belong to no layer or differ in width.
            ValueError: As `index_rows` says.
            FileNotFoundError: There is no such store or session.
        """
        groups = by_schema(segments(source, session))
        facts = [segment_facts(schema) for schema, _ in groups]
        if len(models := sorted({each.model for each in facts})) > 1:
            raise EvalError(f"--session {session}: it has runs of {', '.join(models)}; choose runs of one model")
        modules = {  # attention patterns have no features
            name: each.modules.get(name, name)
            for each, (schema, _) in zip(facts, groups, strict=True)
            for name, kind in point_types(schema).items()
            if None not in kind.shape
        }
        chosen = _chosen(modules, points, session, option, facts[0].layers if facts else None)
        layers = {name: _layer(name, modules[name], option) for name in modules if name in chosen}
        self.points = sorted(layers, key=layers.__getitem__)
        self.layer = np.array([layers[name] for name in self.points])
        lacking = [files for schema, files in groups if not chosen <= point_types(schema).keys()]
        if len(lacking) == len(groups):
            raise EvalError(f"{option}: no run recorded all {len(chosen)} of {some(self.points)}: choose some")
        self.left_out = sum(1 for files in lacking for file in files for _ in whole_runs(file))
        self.model = models[0]
        self.index = index_rows(source, self.points, session=session)
        widths = {name: math.prod(self.index.columns[name].shape) for name in self.points}
        if len(set(widths.values())) > 1:
            listed = some([f"{name} {width}" for name, width in widths.items()])
            raise EvalError(f"{option}: all points need the same width; these have {listed}")
        self.width = widths[self.points[0]]
        self.most = max(1, BATCH_BYTES // self.index.row_bytes)
        self._reader = RowReader(self.index)

    def batches(self, first: int, end: int) -> Iterator[Batch]:
        """Rows `first` to `end`, in order, `most` at once."""
        for row in range(first, end, self.most):
            yield self._read(row, min(end, row + self.most))

    def _read(self, first: int, end: int) -> Batch:
        points = self._reader.take(np.arange(first, end)).points
        values = [points[name].flatten(1) for name in self.points]
        tops, rows = np.stack([largest(of, 1) for of in values]), np.arange(first, end)
        finite = np.isfinite(tops).all(0)
        if finite.all():
            return Batch(rows, values, tops, 0)
        kept = torch.from_numpy(finite)
        return Batch(rows[finite], [of[kept] for of in values], tops[:, finite], int((~finite).sum()))

    def look_up(self, rows: np.ndarray) -> Iterator[tuple[int, str, int, int]]:
        """Of rows by their numbers, int64 `[rows]`: number, run id, position and token id."""
        for first in range(0, len(rows), self.most):
            some = rows[first : first + self.most]
            found = self._reader.take(some)
            runs = [self.index.runs[run].run_id for run in found.run.tolist()]
            yield from zip(some.tolist(), runs, found.position.tolist(), found.token_id.tolist(), strict=True)


def largest(values: torch.Tensor, axis: int) -> np.ndarray:
    """The largest magnitude along an axis, float64; not finite where one is not. Two reductions and no copy."""
    found: np.ndarray = torch.maximum(values.amax(axis), -values.amin(axis)).double().numpy()
    return found


def _chosen(
    modules: Mapping[str, str], points: re.Pattern[str] | Sequence[str], session: str, option: str, layers: int | None
) -> set[str]:
    """The points that are meant, of those by whose names `modules` has their modules' paths."""
    there = f"there is {some(modules)}"
    if isinstance(points, re.Pattern):
        found = {name for name, module in modules.items() if points.fullmatch(name) or points.fullmatch(module)}
        if not found:
            usual = f"none of the points that {option} takes by itself (docs/outliers.md says how to record them)"
            raise EvalError(f"--session {session}: it recorded {usual}; {there}: name some by {option}")
        return found
    found = set[str]()
    for pattern in points:
        try:
            found |= set(recorded([pattern], modules, layers))
        except ValueError as error:
            raise EvalError(f"{option}, session {session}: {error}") from error
    return found


def _layer(name: str, module: str, option: str) -> int:
    found = LAYER.search(name) or LAYER.search(module)
    if not found:
        raise EvalError(f"{option}: {name} belongs to no layer")
    return int(found[1])
