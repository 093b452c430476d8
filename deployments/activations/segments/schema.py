"""The schema of a stored activation file: its columns, its metadata, and the facts in both.

A row is a captured token. Each point has a `fixed_shape_tensor` column named after it. Attention patterns, whose rows
grow, have a `large_list` column with `[heads, tokens seen]` for each token. `docs/format.md` describes all of it.
This module does not import torch, because a writer does not need it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from deployments.activations.facts import FileInfo, PointType, RunInfo
from deployments.points.names import COLUMNS

FORMAT = 4
PHASES = ("prompt", "generated")
METADATA_KEY = b"vitrine"
# `pa.array(PHASES)` would import pandas, which the store's process does not need.
PHASE_WORDS = pa.Array.from_buffers(
    pa.string(),
    len(PHASES),
    [None, pa.py_buffer(np.cumsum([0, *map(len, PHASES)], dtype=np.int32)), pa.py_buffer("".join(PHASES).encode())],
)


class BatchInfo(NamedTuple):
    """What a record batch's own metadata says; `run` and `batches` on the run's last batch alone."""

    run_id: str
    number: int  # which of the run's batches it is, from 0
    run: RunInfo | None
    batches: int | None  # how many the run has


def file_info(schema: pa.Schema) -> FileInfo:
    """What the runs of a file with this schema share; ValueError if `to_batch` did not make it."""
    facts = _said(schema)
    return FileInfo(**{item.name: facts[item.name] for item in fields(FileInfo) if item.name in facts})


def point_types(schema: pa.Schema) -> dict[str, PointType]:
    """Each point's feature shape and dtype; ValueError if `to_batch` did not make the schema."""
    facts = _said(schema)
    names = [name for name in schema.names if name not in COLUMNS]
    try:
        heads, dtypes = facts.get("heads", {}), facts["dtypes"]
        shapes = [(heads[name], None) if name in heads else tuple(schema.field(name).type.shape) for name in names]
        return {name: PointType(shape, dtypes[name]) for name, shape in zip(names, shapes, strict=True)}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("Not a Vitrine activation schema: its points are not described") from error


def _said(schema: pa.Schema) -> Mapping[str, Any]:
    metadata: dict[bytes, bytes] = schema.metadata or {}
    if METADATA_KEY not in metadata:
        raise ValueError("Not a Vitrine activation schema: its metadata has no 'vitrine'")
    return _parsed(metadata[METADATA_KEY])


@lru_cache(64)  # the same few schemas come with every batch
def _parsed(text: bytes) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(text)
    return found


def free_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows, whose dictionary shares no memory with them: a file's writer keeps its first batch's."""
    place = batch.schema.get_field_index("phase")
    phases = pa.DictionaryArray.from_arrays(batch.column(place).indices, PHASE_WORDS)
    return batch.set_column(place, batch.schema.field(place), phases)


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """A batch without rows, whose dictionary of phases is that of the other batches."""
    return free_batch(pa.record_batch([pa.array([], field.type) for field in schema], schema=schema))


def batch_metadata(run_id: str, first: int, count: int, run: RunInfo | None = None) -> list[dict[str, str]]:
    """The metadata of a run's batches `first` to `first + count`; `run` if the last of them is its last."""
    metadata = [{"run_id": run_id, "batch": str(number)} for number in range(first, first + count)]
    if run:
        metadata[-1] |= {"run": run.as_json, "batches": str(first + count)}
    return metadata


def batch_info(metadata: Mapping[bytes, bytes] | None) -> BatchInfo:
    """The inverse of `batch_metadata`, ValueError if it is another's."""
    try:
        metadata = metadata or {}
        run_id, number = metadata[b"run_id"].decode(), int(metadata[b"batch"])
        if b"run" not in metadata:
            return BatchInfo(run_id, number, None, None)
        return BatchInfo(run_id, number, RunInfo.of(json.loads(metadata[b"run"])), int(metadata[b"batches"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("Not a Vitrine activation batch: its metadata names no run") from error
