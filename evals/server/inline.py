"""Some activation values of a sample's runs, fetched over HTTP, for the sample's own record."""

import hashlib
import io
import json
import math
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

import numpy as np

from evals.activations_meta import ITEM_BYTES, points_of, runs_of, shape_of, tokens_of, why_not_stored
from evals.server.answers import RequestFailed

Download = Callable[[str, dict[str, Any], BinaryIO], Awaitable[None]]
Record = dict[str, Any]
Points = dict[str, Record]

MOST_BYTES = 32 << 20  # of one answer, which is held in memory
MOST_FACTS = 1 << 20  # bytes of the member that says the points' dtypes
HEADER = 4096  # the most bytes of a member before its values
# What reading an answer raises that is not the file that was asked for.
UNREADABLE = (
    BadZipFile,
    zlib.error,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    TypeError,
    ValueError,
)


async def sampled_values(download: Download, metas: Sequence[Record | None], values: int) -> dict[str, Record]:
    """A few values of each point of the runs that a sample's turns stored.

    Which ones follows from the run's id alone: the same tokens and dimensions at all points of a shape, each time.
    What is not there is said in its place; nothing is raised for it.

    Args:
        download: `ChatClient.download`.
        metas: the turns' `activations_meta`, as the server gave them.
        values: the most numbers of a point.

    Returns:
        By run id and point `{"format": "sampled", "shape", "dtype", "data", "sample_info"}`. `data` has a row for
        each of `sample_info.positions` (tokens of prompt + generated), in it a number for each of
        `sample_info.dimensions` (of the token's value, flattened); null is a number that is not finite. Where
        there is nothing to give, `{"format": "sampled", "error"}`. A run that is not stored is `{"error"}`; where
        the answer names none, it is called `turn-<number>`.
    """
    found: dict[str, Record] = {}
    for turn, meta in enumerate(metas):
        runs = runs_of(meta or {})
        why = why_not_stored(meta)
        if why or meta is None:
            found |= {name: {"error": why} for name in [run["run_id"] for run in runs] or [f"turn-{turn}"]}
            continue
        for run in runs:
            found[run["run_id"]] = await _of_run(download, meta, run, values)
    return found


async def _of_run(download: Download, meta: Record, run: Record, values: int) -> Record:
    """The values of a run's points, in their order."""
    points, found = points_of(run), Points()
    if not points:
        return {"error": "the answer names none of its points"}
    sizes: dict[str, int] = {}
    for name, at in points.items():
        found[name] = {}  # the place
        try:
            sizes[name] = _bytes(at, run)
        except ValueError as error:
            found |= _failed([name], str(error))
    for names in _requests(sizes):
        if sizes[names[0]] > MOST_BYTES:
            found |= _failed(names, f"more than {MOST_BYTES >> 20} MiB of this run: sample it from its file")
            continue
        params = {"run": run["run_id"], "points": names, "format": "npz"}
        try:
            await download(f"activations/session/{meta.get('session_id')}/data", params, file := io.BytesIO())
            most = {name: sizes[name] for name in names} | {"position": 8 * tokens_of(run), "run.facts": MOST_FACTS}
            found |= _read(file, run["run_id"], names, values, most)
        except RequestFailed as error:
            found |= _failed(names, str(error))
        except UNREADABLE as error:
            found |= _failed(names, f"the answer is no npz file of the run: {type(error).__name__}: {error}")
    return found


def _requests(sizes: dict[str, int]) -> Iterator[list[str]]:
    """The names of points, as many at a time as an answer may hold."""
    names: list[str] = []
    size = 0
    for name, its in sizes.items():
        if names and size + its > MOST_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += its
    if names:
        yield names


def _bytes(at: Record, run: Record) -> int:
    """The most that a point takes in an npz file; an axis that grows is as long as the run.

    Raises:
        ValueError: it has no shape, or no number.
    """
    shape, tokens = shape_of(at), tokens_of(run)
    numbers = math.prod([tokens if size is None else size for size in shape])
    if not numbers:
        raise ValueError(f"it has no numbers: its shape is {shape}, in a run of {tokens} tokens")
    return numbers * max(4, ITEM_BYTES.get(str(at.get("dtype")), 8))  # numpy has bfloat16 as float32


def _failed(names: Sequence[str], reason: str) -> Points:
    return {name: {"format": "sampled", "error": reason} for name in names}


def _read(body: BinaryIO, run_id: str, names: Sequence[str], values: int, most: dict[str, int]) -> Points:
    """The values of the points that an answer holds; what is odd about one is said in its place.

    Args:
        body: The answer, an npz file.
        run_id: The run.
        names: Its points that were asked for.
        values: The most numbers of a point.
        most: By member of the file the most bytes of its values.
    """
    found = Points()
    with ZipFile(body) as file:
        dtypes = json.loads(str(_array(file, "run.facts", most)))["dtypes"]
        positions = _array(file, "position", most)
        for name in names:
            try:
                found[name] = _sample(_array(file, name, most), positions, str(dtypes[name]), run_id, values)
            except UNREADABLE as error:
                found |= _failed([name], f"the answer does not hold it: {type(error).__name__}: {error}")
    return found


def _array(file: ZipFile, name: str, most: dict[str, int]) -> np.ndarray:
    """An array of an npz file; its size is checked before it inflates, and `zipfile` inflates no more than that.

    Raises:
        KeyError: There is no such array.
        ValueError: It is larger than `most` says, holds pickles, or its compression has no bounded steps.
    """
    member = file.getinfo(f"{name}.npy")
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed with the unknown method {member.compress_type}")
    if member.file_size > most[name] + HEADER:
        raise ValueError(f"{name} has {member.file_size} bytes, more than the {most[name]} that it should have")
    with file.open(member) as values:
        found: np.ndarray = np.lib.format.read_array(values, allow_pickle=False)
    return found


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
        "format": "sampled",
        "shape": list(tensor.shape),
        "dtype": dtype,
        "data": [[number if math.isfinite(number) else None for number in line] for line in picked.tolist()],
        "sample_info": {"positions": positions[row].tolist(), "dimensions": column.tolist()},
    }
