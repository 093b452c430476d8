"""Stored runs, fetched over HTTP as bytes of their files, and read as arrays of numpy."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from evals.server.client import ChatClient
from vitrine.runs.fetching import run_bytes
from vitrine.runs.rows import Run, of_files


async def stored_run(client: ChatClient, entry: Mapping[str, Any]) -> Run:
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


def array_of(run: Run, point: str) -> np.ndarray:
    """A point's values `[tokens, ...features]`; attention patterns are `[tokens, heads, widest]`, padded with zeros."""
    rows = run[point]
    if isinstance(rows, np.ndarray):
        return rows
    padded = np.zeros((len(rows), len(rows[0]), max(row.shape[1] for row in rows)), np.float32)
    for to, row in zip(padded, rows, strict=True):
        to[:, : row.shape[1]] = row
    return padded
