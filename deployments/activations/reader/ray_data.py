"""Stored rows as a Ray dataset. Its tasks read pieces of the files on the nodes where they run."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import ray.data
import torch

from deployments.activations.reader.row_index import Chosen, RowIndex, index_rows
from deployments.activations.reader.row_reader import RowReader
from deployments.activations.segments.schema import PHASES

_BLOCK = 64 << 20  # bytes of rows that become a table at once


def ray_dataset(
    source: str | os.PathLike[str],
    points: Sequence[str],
    *,
    session: str | None = None,
    runs: Collection[str] | None = None,
    tokens: Chosen = "all",
    bfloat16: Literal["float32", "bits"] = "float32",
    **read: Any,
) -> ray.data.Dataset:
    """Rows with the columns `run_id`, `position`, `phase`, `token_id`, and each point as a tensor.

    Nothing is read before the dataset is used. The files must lie at the same path on every node that reads. Arguments
    are as for `index_rows`; bfloat16, which numpy and Arrow do not have, becomes float32 of the same values, or its
    `bits` in uint16, half as large: of a torch tensor of these, `.view(torch.bfloat16)` is what was stored. `read` are
    further arguments of `ray.data.range`, as `override_num_blocks`.
    """
    if bfloat16 not in ("float32", "bits"):
        raise ValueError(f"bfloat16: {bfloat16!r} is neither 'float32' nor 'bits'")
    index = index_rows(source, points, session=session, runs=runs, tokens=tokens)
    work: Any = _tables
    numbers = ray.data.range(len(index), **read)
    return numbers.map_batches(work, batch_size=None, fn_args=(index, bfloat16 == "bits"))


def _tables(numbers: dict[str, np.ndarray], index: RowIndex, bits: bool) -> Iterator[pa.Table]:
    """The rows of a block of numbers, some at once."""
    reader, most = RowReader(index), max(1, _BLOCK // index.row_bytes)
    ids = np.array([run.run_id for run in index.runs], dtype=object)
    for first in range(0, len(numbers["id"]), most):
        batch = reader.take(numbers["id"][first : first + most])
        columns = {
            "run_id": pa.array(ids[batch.run.numpy()], pa.string()),
            "position": pa.array(batch.position.numpy()),
            "phase": pa.array(np.array(PHASES, dtype=object)[batch.generated.int().numpy()], pa.string()),
            "token_id": pa.array(batch.token_id.numpy()),
        }
        for name, values in batch.points.items():
            if values.dtype == torch.bfloat16:
                values = values.view(torch.uint16) if bits else values.float()
            columns[name] = pa.FixedShapeTensorArray.from_numpy_ndarray(values.numpy())
        yield pa.table(columns)
