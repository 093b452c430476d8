"""Outlier features: the same features, far from zero in many layers and at many tokens.

Dettmers, Lewis, Belkada and Zettlemoyer (2022), "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale",
section 4.1.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from deployments.activations import read_run
from deployments.activations.reader.row_index import RowIndex, index_rows
from deployments.activations.reader.row_reader import RowReader
from deployments.activations.reader.sources import by_schema, segments
from deployments.activations.segments.schema import file_info, point_types
from deployments.activations.segments.segments import whole_runs
from deployments.points.names import recorded
from evals.config import EvalError, some

Record = dict[str, Any]
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)")  # of a point's or a module's name
MOST_SHOWN = 64  # features of the map
BATCH_BYTES = 32 << 20  # of rows in memory at once, in the dtype that was stored
# What attention's first projections and the MLP's read, by canonical names or the projections' own.
INPUTS = re.compile(
    r"layers\.\d+\.(?:(?:input|post_attention)_layernorm\.output|(?:attention|mlp)\.input)"
    r"|.+\.(?:[qkv]_proj|qkv_proj|query_key_value|c_attn|gate_proj|up_proj|gate_up_proj|dense_h_to_4h|c_fc|fc1)\.input"
)


class Rule(NamedTuple):
    """When a feature is an outlier.

    Attributes:
        magnitude: A value counts from this magnitude on.
        layers: The least share of recorded layers with such a value; one value makes a layer count.
        positions: The least share of token positions with such a value, whatever the layer.
    """

    magnitude: float = 6.0
    layers: float = 0.25
    positions: float = 0.06


class _Counts:
    """What was counted so far, of points that have the same features.

    Attributes:
        largest: The largest magnitude that counts, 0 where there is none, float64 `[points, features]`.
        row: The number of the first row that has it, int64 `[points, features]`.
        positions: Rows with one at any point, each once, int64 `[features]`.
        rows: All rows that count.
    """

    def __init__(self, points: int, width: int) -> None:
        self.largest, self.row = np.zeros((points, width)), np.full((points, width), -1)
        self.positions, self.rows = np.zeros(width, dtype=np.int64), 0

    def add(self, values: Sequence[torch.Tensor], rows: np.ndarray, magnitude: float) -> None:
        """Count values of each point, `[rows, features]`, of rows by their numbers; those not finite are left out."""
        finite = torch.stack([_largest(of, 1).isfinite() for of in values]).all(0)
        if not finite.all():
            values, rows = [of[finite] for of in values], rows[finite.numpy()]
        if not len(rows):
            return
        self.rows += len(rows)
        counts = np.zeros((len(rows), len(self.positions)), dtype=bool)
        for point, of in enumerate(values):
            columns = np.flatnonzero((_largest(of, 0) >= magnitude).numpy())
            magnitudes = of[:, columns].double().abs().numpy()
            counts[:, columns] |= magnitudes >= magnitude
            row, top = magnitudes.argmax(axis=0), magnitudes.max(axis=0, initial=0)
            better = top > self.largest[point, columns]
            self.largest[point, columns[better]], self.row[point, columns[better]] = top[better], rows[row[better]]
        self.positions += counts.sum(axis=0)


def census(
    source: str | os.PathLike[str], session: str, points: Sequence[str] | None = None, rule: Rule | None = None
) -> Record:
    """Look through all rows of a session, in memory of a batch and of points times features.

    Args:
        source: The store's directory.
        session: Which session.
        points: Names, in which `*` is any layer; without them the inputs of attention's and the MLP's first
            projections.
        rule: When a feature is an outlier; without it the one of LLM.int8().

    Returns:
        What outliers.json holds; docs/probes.md describes it.

    Raises:
        EvalError: The session lacks points, its runs do not fit together, or no row is finite.
        ValueError: As `index_rows` says.
        FileNotFoundError: There is no such store or session.
    """
    rule = rule or Rule()
    model, layer_of, left_out = _points(source, session, points)
    names, of_point = list(layer_of), np.array(list(layer_of.values()))
    layers = np.unique(of_point)
    index = index_rows(source, names, session=session)
    widths = {name: math.prod(index.columns[name].shape) for name in names}
    if len(set(widths.values())) > 1:
        listed = some([f"{name} {width}" for name, width in widths.items()])
        raise EvalError(f"--points: all points need the same width; these have {listed}")
    counts, reader = _Counts(len(names), widths[names[0]]), RowReader(index)
    step = max(1, BATCH_BYTES // index.row_bytes)
    for first in range(0, len(index), step):
        rows = np.arange(first, min(first + step, len(index)))
        values = reader.take(rows).points
        counts.add([values[name].flatten(1) for name in names], rows, rule.magnitude)
    if not counts.rows:
        raise EvalError(
            f"--points: none of {len(index)} rows is finite at all {len(names)} of {some(names)}: choose others"
        )
    by_layer = np.stack([counts.largest[of_point == layer].max(axis=0) for layer in layers])  # [layers, features]
    shares = (by_layer > 0).mean(axis=0), counts.positions / counts.rows
    often = np.flatnonzero(counts.positions)
    often = often[np.lexsort((often, -by_layer.max(axis=0)[often], -counts.positions[often]))]
    outliers = [
        {
            "feature": feature,
            "layers": layers[by_layer[:, feature] > 0].tolist(),
            "positions": float(shares[1][feature]),
            "largest": float(by_layer[:, feature].max()),
            "where": _where(index, reader, names, counts, feature),
        }
        for feature in often.tolist()
        if shares[0][feature] >= rule.layers and shares[1][feature] >= rule.positions
    ]
    shown = np.sort(often[:MOST_SHOWN])
    return {
        "session": session,
        "model": model,
        "points": names,
        "layers": layers.tolist(),
        "width": len(counts.positions),
        "runs": len(index.runs),
        "runs_left_out": left_out,
        "tokens": counts.rows,
        "tokens_not_finite": len(index) - counts.rows,
        "thresholds": rule._asdict(),
        "features": outliers,
        "map": {
            "of": len(often),
            "features": shown.tolist(),
            "largest": [[value or None for value in row] for row in by_layer[:, shown].tolist()],
        },
    }


def _largest(values: torch.Tensor, axis: int) -> torch.Tensor:
    """The largest magnitude along an axis, float64; not finite where one is not. Two reductions and no copy."""
    return torch.maximum(values.amax(axis), -values.amin(axis)).double()


def _points(
    source: str | os.PathLike[str], session: str, points: Sequence[str] | None
) -> tuple[str, dict[str, int], int]:
    """The model, the layers of the points that are meant, ascending, and how many runs did not record all of them."""
    groups = by_schema(segments(source, session))
    facts = [file_info(schema) for schema, _ in groups]
    if len(models := sorted({each.model for each in facts})) > 1:
        raise EvalError(f"--session {session}: it has runs of {', '.join(models)}; choose runs of one model")
    modules = {  # attention patterns have no features
        name: each.modules.get(name, name)
        for each, (schema, _) in zip(facts, groups, strict=True)
        for name, kind in point_types(schema).items()
        if None not in kind.shape
    }
    chosen = _chosen(modules, points, session, facts[0].layers if facts else None)
    layers = dict[str, int]()
    for name in chosen:
        if not (match := LAYER.search(name) or LAYER.search(modules[name])):
            raise EvalError(f"--points: {name} belongs to no layer")
        layers[name] = int(match[1])
    lacking = [files for schema, files in groups if not chosen <= point_types(schema).keys()]
    if len(lacking) == len(groups):
        raise EvalError(f"--points: no run recorded all {len(chosen)} of {some(sorted(chosen))}: choose some")
    left_out = sum(1 for files in lacking for file in files for _ in whole_runs(file))
    return models[0], {name: layers[name] for name in sorted(chosen, key=lambda name: (layers[name], name))}, left_out


def _chosen(modules: Mapping[str, str], points: Sequence[str] | None, session: str, layers: int | None) -> set[str]:
    """The points that are meant, of those by whose names `modules` has their modules' paths."""
    if points is not None:
        try:
            return {name for pattern in points for name in recorded([pattern], modules, layers)}
        except ValueError as error:
            raise EvalError(f"--points, session {session}: {error}") from error
    inputs = {name for name, module in modules.items() if INPUTS.fullmatch(name) or INPUTS.fullmatch(module)}
    if not inputs:
        usual = "none of the inputs of projections (docs/probes.md says how to record them)"
        raise EvalError(f"--session {session}: it recorded {usual}; there is {some(modules)}: name some by --points")
    return inputs


def _where(index: RowIndex, reader: RowReader, names: Sequence[str], counts: _Counts, feature: int) -> Record:
    """Where a feature's largest value is, with its token's text, None where that was not stored."""
    point = int(counts.largest[:, feature].argmax())
    row = counts.row[point, [feature]]
    read, block = reader.take(row), int(index.starts.searchsorted(row[0], side="right")) - 1
    run = read_run(index.paths[index.file[block]], index.runs[int(read.run[0])].run_id, [names[point]])
    position, token = int(read.position[0]), None
    text, offsets = run.facts.text, run.text_offsets
    if text is not None and offsets is not None:
        begins = dict(zip(run.positions.tolist(), offsets.tolist(), strict=True))
        end = len(text) if position + 1 == run.facts.tokens else begins.get(position + 1)
        token = None if end is None else text[begins[position] : end]
    place = {"point": names[point], "run_id": run.facts.run_id, "position": position}
    return place | {"token_id": int(read.token_id[0]), "token": token}
