"""Some activation values of a sample's runs, fetched over HTTP, for the sample's own record."""

import hashlib
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evals.activations_meta import points_of, runs_of, why_not_stored
from evals.server.answers import RequestFailed
from evals.server.client import ChatClient
from vitrine.runs.fetching import named, run_bytes
from vitrine.runs.rows import Run, of_files

Record = dict[str, Any]
Points = dict[str, Record]

MOST_BYTES = 1 << 30  # of a run, which is copied to a temporary file
# What reading a run raises that is not what was asked for.
UNREADABLE = (AttributeError, LookupError, MemoryError, NotImplementedError, OSError, TypeError, ValueError)


async def sampled_values(client: ChatClient, metas: Sequence[Record | None], values: int) -> dict[str, Record]:
    """A few values of each point of the runs that a sample's turns stored.

    Which ones follows from the run's id alone: the same tokens and dimensions at all points of a shape, each time.
    What is not there is said in its place; nothing is raised for it.

    Args:
        client: of the server that answered.
        metas: the turns' `activations_meta`, as the server gave them.
        values: the most numbers of a point.

    Returns:
        By run id and point `{"format": "sampled_tensor", "shape", "dtype", "data", "sample_info"}`. `data` has a row
        for each of `sample_info.positions` (tokens of prompt + generated), in it a number for each of
        `sample_info.dimensions` (of the token's value, flattened); null is a number that is not finite. Where
        there is nothing to give, `{"format": "sampled_tensor", "error"}`. A run that is not there is `{"error"}`; where
        the answer names none, it is called `turn-<number>`.
    """
    sampled: dict[str, Record] = {}
    for turn, meta in enumerate(metas):
        runs = runs_of(meta or {})
        why = why_not_stored(meta)
        if why or meta is None:
            sampled |= {name: {"error": why} for name in [run["run_id"] for run in runs] or [f"turn-{turn}"]}
            continue
        try:
            entries = await named(client, [run["run_id"] for run in runs])
        except RequestFailed as error:
            sampled |= {run["run_id"]: {"error": str(error)} for run in runs}
            continue
        for run in runs:
            if run["run_id"] not in entries:
                sampled[run["run_id"]] = {"error": "the server does not list it"}
                continue
            try:
                sampled[run["run_id"]] = await _of_run(client, run, entries[run["run_id"]], values)
            except RequestFailed as error:
                sampled[run["run_id"]] = {"error": str(error)}
            except UNREADABLE as error:
                sampled[run["run_id"]] = {"error": f"it cannot be read: {type(error).__name__}: {error}"}
    return sampled


async def _of_run(client: ChatClient, run: Record, entry: Record, values: int) -> Record:
    """The values of a run's points, in their order."""
    if (size := int(entry["bytes"])) > MOST_BYTES:
        return {"error": f"it has {size} bytes: sample it from its file"}
    stored = await _stored_run(client, entry)
    by_point = Points()
    for name in points_of(run) or stored:
        try:
            values_of = _array_of(stored, name)
            by_point[name] = _sample(values_of, stored.positions, stored.dtypes[name], run["run_id"], values)
        except UNREADABLE as error:
            by_point[name] = {"format": "sampled_tensor", "error": f"{type(error).__name__}: {error}"}
    return by_point


async def _stored_run(client: ChatClient, entry: Mapping[str, Any]) -> Run:
    """A run that the server lists; its values are read from a temporary file when they are used.

    Raises:
        RequestFailed: The server refuses, or does not answer.
        ValueError: What it sends is none of Vitrine's files, or damaged.
    """
    with tempfile.NamedTemporaryFile(suffix=".arrow") as file:
        async for piece in run_bytes(client, [entry]):
            file.write(piece)
        file.flush()
        (run,) = of_files(Path(file.name))  # mapped, so that it outlives the name
    return run


def _array_of(run: Run, point: str) -> np.ndarray:
    """A point's values `[tokens, ...features]`; attention patterns are `[tokens, heads, widest]`, padded with zeros."""
    rows = run[point]
    if isinstance(rows, np.ndarray):
        return rows
    padded = np.zeros((len(rows), len(rows[0]), max(row.shape[1] for row in rows)), np.float32)
    for to, row in zip(padded, rows, strict=True):
        to[:, : row.shape[1]] = row
    return padded


def _sample(tensor: np.ndarray, positions: np.ndarray, dtype: str, run_id: str, values: int) -> dict[str, Any]:
    if not tensor.size or not tensor.ndim or tensor.dtype.kind not in "biuf":
        raise ValueError(f"there is an array of {tensor.dtype} of the shape {list(tensor.shape)}")
    rows = tensor.reshape(len(tensor), -1)
    tokens, width = rows.shape
    many = min(tokens, max(1, math.isqrt(values)))
    across = min(width, values // many)
    many = min(tokens, values // across)
    draw = np.random.default_rng(list(hashlib.sha256(run_id.encode()).digest()))
    row = np.sort(draw.choice(tokens, many, replace=False))
    column = np.sort(draw.choice(width, across, replace=False))
    picked = rows[np.ix_(row, column)].astype(np.float64)
    return {
        "format": "sampled_tensor",
        "shape": list(tensor.shape),
        "dtype": dtype,
        "data": [[number if math.isfinite(number) else None for number in line] for line in picked.tolist()],
        "sample_info": {"positions": positions[row].tolist(), "dimensions": column.tolist()},
    }
