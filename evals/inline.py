"""Some activation values of a sample's runs, fetched over HTTP, for the sample's own record."""

import hashlib
import io
import json
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any
from zipfile import BadZipFile

import numpy as np

from evals.client import RequestFailed

Download = Callable[[str, dict[str, Any]], Awaitable[bytes]]
Points = dict[str, dict[str, Any]]  # by name, where each lies, as `activations_meta` says it

MOST_BYTES = 32 << 20  # of one answer, which is held in memory


async def sampled_values(download: Download, metas: Sequence[dict[str, Any] | None], values: int) -> dict[str, Points]:
    """A few values of each point of the runs that a sample's turns stored.

    Which ones follows from the run's id alone: the same tokens and dimensions at all points of a shape, each time.
    What cannot be fetched is said in its place; nothing is raised for it.

    Args:
        download: `ChatClient.download`.
        metas: the turns' `activations_meta`, as the server gave them.
        values: the most numbers of a point.

    Returns:
        By run id and point `{"format": "sampled", "shape", "dtype", "data", "sample_info"}`. `data` has a row for
        each of `sample_info.positions` (tokens of prompt + generated), in it a number for each of
        `sample_info.dimensions` (of the token's value, flattened); null is a number that is not finite. Where
        there is nothing to give, `{"format": "sampled", "error"}`.
    """
    found: dict[str, Points] = {}
    for meta in metas:
        if meta is None or meta.get("status") != "stored":
            continue
        for run in meta.get("runs", []):
            if points := run.get("points"):
                session_id, run_id = str(meta["session_id"]), str(run["run_id"])
                found[run_id] = await _of_run(download, session_id, run_id, points, values)
    return found


async def _of_run(download: Download, session_id: str, run_id: str, points: Points, values: int) -> Points:
    found: Points = {}
    for names in _requests(points):
        if _bytes(points[names[0]]) > MOST_BYTES:
            found |= _failed(names, f"more than {MOST_BYTES >> 20} MiB of this run: sample it from its file")
            continue
        params = {"run": run_id, "points": names, "format": "npz"}
        try:
            body = await download(f"activations/session/{session_id}/data", params)
            found |= _read(body, run_id, names, values)
        except RequestFailed as error:
            found |= _failed(names, str(error))
        except (BadZipFile, KeyError, ValueError, OSError) as error:
            found |= _failed(names, f"the answer is no npz file of the run: {type(error).__name__}: {error}")
    return found


def _requests(points: Points) -> Iterator[list[str]]:
    """The names of points, as many at a time as an answer may hold."""
    names: list[str] = []
    size = 0
    for name, at in points.items():
        if names and size + _bytes(at) > MOST_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += _bytes(at)
    yield names


def _bytes(at: dict[str, Any]) -> int:
    """Of a point in an npz file, by at most 8 bytes a number; an axis that grows is as long as the run."""
    tokens, item = at["shape"][0], 8 if at["dtype"] == "float64" else 4
    return int(item * math.prod(tokens if size is None else size for size in at["shape"]))


def _failed(names: Sequence[str], reason: str) -> Points:
    return {name: {"format": "sampled", "error": reason} for name in names}


def _read(body: bytes, run_id: str, names: Sequence[str], values: int) -> Points:
    with np.load(io.BytesIO(body)) as file:  # which refuses pickles
        dtypes = json.loads(str(file["run.facts"]))["dtypes"]
        positions = file["position"]
        return {name: _sample(file[name], positions, str(dtypes[name]), run_id, values) for name in names}


def _sample(tensor: np.ndarray, positions: np.ndarray, dtype: str, run_id: str, values: int) -> dict[str, Any]:
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
        "format": "sampled",
        "shape": list(tensor.shape),
        "dtype": dtype,
        "data": [[number if math.isfinite(number) else None for number in line] for line in picked.tolist()],
        "sample_info": {"positions": positions[row].tolist(), "dimensions": column.tolist()},
    }
