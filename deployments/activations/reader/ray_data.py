"""Stored rows as a Ray dataset, whose tasks read pieces of the files where they run."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import ray.data
import torch
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from deployments.activations.reader.row_index import Chosen, RowIndex, index_rows
from deployments.activations.reader.row_reader import RowBatch, RowReader
from deployments.activations.segments.schema import PHASES

_BLOCK = 64 << 20  # bytes of rows that a task reads at once


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

    Nothing is read before the dataset is used. The files must lie at the same path on every node that reads.

    Args:
        source: A store's or session's directory, or one file, as a path or `file://` URI; or the id of a run.
        points: The points each row is to have; runs that did not record them all are left out.
        session: This session's runs alone.
        runs: These runs alone.
        tokens: `"prompt"`, `"generated"` or `"all"`.
        bfloat16: What bfloat16 becomes, which numpy and Arrow do not have: float32 of the same values, or its bits
            in uint16, half as large; of a torch tensor of these, `.view(torch.bfloat16)` is what was stored.
        read: Further arguments of `ray.data.read_datasource`, as `override_num_blocks`.

    Raises:
        ValueError: As `index_rows` says, or of `bfloat16`.
        FileNotFoundError: There is no such source or session.
    """
    if bfloat16 not in ("float32", "bits"):
        raise ValueError(f"bfloat16: {bfloat16!r} is neither 'float32' nor 'bits'")
    index = index_rows(source, points, session=session, runs=runs, tokens=tokens)
    found: ray.data.Dataset = ray.data.read_datasource(_StoredRows(index, bfloat16 == "bits"), **read)
    return found


class _StoredRows(Datasource):
    def __init__(self, index: RowIndex, bits: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index = index
        self._bits = bits
        self._row_bytes = sum(
            column.width * (2 if column.dtype == torch.bfloat16 and not bits else 1)
            for column in index.columns.values()
        )

    def estimate_inmemory_data_size(self) -> int:
        return len(self._index) * self._row_bytes

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        rows, tasks = len(self._index), list[ReadTask]()
        count = min(parallelism, rows)
        for first, end in ((rows * i // count, rows * (i + 1) // count) for i in range(count)):
            part = self._index.part(first, end)
            metadata = BlockMetadata(
                num_rows=end - first,
                size_bytes=(end - first) * self._row_bytes,
                input_files=tuple(map(str, part.paths)),
                exec_stats=None,
            )
            read = partial(_read, part, self._bits, max(1, _BLOCK // self._row_bytes))
            tasks.append(ReadTask(read, metadata, per_task_row_limit=per_task_row_limit))
        return tasks


def _read(index: RowIndex, bits: bool, rows: int) -> Iterator[pa.Table]:
    reader = RowReader(index)
    for first in range(0, len(index), rows):
        yield _table(index, reader.between(first, min(len(index), first + rows)), bits)


def _table(index: RowIndex, batch: RowBatch, bits: bool) -> pa.Table:
    runs = pa.DictionaryArray.from_arrays(batch.run.to(torch.int32).numpy(), [run.run_id for run in index.runs])
    phase = pa.DictionaryArray.from_arrays(batch.generated.to(torch.int8).numpy(), PHASES)
    columns = {
        "run_id": runs.cast(pa.string()),
        "position": pa.array(batch.position.numpy()),
        "phase": phase.cast(pa.string()),
        "token_id": pa.array(batch.token_id.numpy()),
    }
    return pa.table(columns | {name: _tensors(value, bits) for name, value in batch.points.items()})


def _tensors(values: torch.Tensor, bits: bool) -> pa.Array:
    if values.dtype == torch.bfloat16:
        values = values.view(torch.uint16) if bits else values.float()
    rows: np.ndarray = values.numpy()
    return pa.FixedShapeTensorArray.from_numpy_ndarray(rows)
