"""Stored runs, fetched over HTTP as bytes of their files, and read as arrays of numpy."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from deployments.run_files import MAGIC, head_length, spans
from evals.server.answers import RequestFailed
from evals.server.client import ChatClient

HEAD_BYTES = 1 << 16  # of a file's beginning; nearly always enough for its head
MOST_LISTED = 100  # runs that the server lists at once, each with all of its points

Entry = dict[str, Any]


async def entries_of(client: ChatClient, run_ids: Sequence[str]) -> dict[str, Entry]:
    """What the server lists of some runs, by their ids; those that it has not are left out.

    Raises:
        RequestFailed: as of `ChatClient.read`, or it is no list of runs.
    """
    found = dict[str, Entry]()
    for first in range(0, len(run_ids), MOST_LISTED):
        some = ",".join(run_ids[first : first + MOST_LISTED])
        page = await client.read("activations/runs", run=some, limit=MOST_LISTED)
        try:
            found |= {entry["run_id"]: entry for entry in page["data"]}
        except (TypeError, KeyError) as error:
            raise RequestFailed("the server lists no runs") from error
    return found


async def write_runs(client: ChatClient, entries: Sequence[Entry], to: IO[bytes]) -> None:
    """Write runs of one file as such a file without a footer: its head, and the runs in their order.

    Args:
        client: of the server.
        entries: What the server lists of these runs.
        to: An empty file.

    Raises:
        RequestFailed: as of `ChatClient.file_bytes`, or the server's list or file is none.
    """
    try:
        path = f"activations/session/{entries[0]['session_id']}/files/{entries[0]['file']}"
        owner = {"owner": entries[0]["owner"] or ""} if "owner" in entries[0] else {}
        places = [{name: int(one[name]) for name in ("offset", "bytes")} for one in entries]
    except (TypeError, KeyError, ValueError) as error:
        raise RequestFailed("the server does not list where runs lie in their files") from error
    beginning, length = b"", None
    while length is None:
        size = 8 * len(beginning) or HEAD_BYTES
        beginning = b"".join([page async for page in client.file_bytes(path, 0, size, **owner)])
        try:
            length = head_length(beginning)
        except ValueError as error:
            raise RequestFailed(f"{path} is no file of activations") from error
        if length is None and len(beginning) < size:
            raise RequestFailed(f"{path} is cut short")
    to.write(beginning[:length])
    for first, end in spans(length, places):
        to.write(known := beginning[first:end])
        async for page in client.file_bytes(path, first + len(known), end, **owner):
            to.write(page)


def arrays_of(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The columns of the only run of a file that `write_runs` wrote, and the points' dtypes.

    Points are `[tokens, ...features]`, bfloat16 as float32; attention patterns are padded with zeros to `[tokens,
    heads, widest]`. Values are read from the file when they are used.

    Raises:
        ValueError: The file is none of Vitrine, or damaged.
    """
    source = pa.memory_map(str(path))
    source.seek(len(MAGIC))
    with pa.ipc.open_stream(source) as stream:
        table = stream.read_all()
    table.validate(full=True)
    try:
        said = json.loads(table.schema.metadata[b"vitrine"])
        dtypes, heads = dict[str, str](said["dtypes"]), said.get("heads", {})
        columns = {name: table[name].to_numpy() for name in ("position", "token_id")}
        for name in dtypes:
            columns[name] = _dense(table[name], dtypes[name], heads.get(name))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no activations of a run: {error!r}") from error
    return columns, dtypes


def _dense(column: pa.ChunkedArray, dtype: str, heads: int | None) -> np.ndarray:
    if heads is None:
        parts = [chunk.to_numpy_ndarray() for chunk in column.chunks if len(chunk)]
        return _plain(parts[0] if len(parts) == 1 else np.concatenate(parts), dtype)
    rows = [_plain(row.values.to_numpy(), dtype).reshape(heads, -1) for row in column]
    padded = np.zeros((len(rows), heads, max(row.shape[1] for row in rows)), rows[0].dtype)
    for to, row in zip(padded, rows, strict=True):
        to[:, : row.shape[1]] = row
    return padded


def _plain(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":  # stored as its bits, which are the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values
