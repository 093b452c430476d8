"""Stored runs as Arrow tables with a row per token or a row per run, for pandas, Polars and DuckDB."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from deployments.activations.facts import PointType
from deployments.activations.reader.sources import Wanted, chosen, select
from deployments.activations.segments.columns import DTYPES
from deployments.activations.segments.segments import RunBatches
from deployments.points.names import COLUMNS
from deployments.points.token_choices import ROLES

_RUNS = pa.schema(
    {
        "run_id": pa.string(),
        "session_id": pa.string(),
        "model": pa.string(),
        "created": pa.timestamp("us"),  # UTC: with a zone, DuckDB wants a further package
        "sample_id": pa.string(),
        "tags": pa.map_(pa.string(), pa.string()),
        "prompt_tokens": pa.int64(),
        "tokens": pa.int64(),
        "rows": pa.int64(),
        "points": pa.list_(pa.string()),
        "finish_reason": pa.string(),
        "sampling": pa.string(),
        "interventions": pa.string(),
        "logit_lens": pa.string(),
        "request_id": pa.string(),
        "messages_hash": pa.string(),
        "text": pa.string(),
    }
)


def table(
    source: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    *,
    session: str | None = None,
    runs: Collection[str] | None = None,
    plain: bool = False,
) -> pa.Table:
    """A row for each captured token, over the maps of the files; batches below 64 KiB are copies.

    `source`, `session` and `runs` are as for `index_rows`. `columns` are columns of the files and points, in this
    order, by default all; runs that did not record the points that are named are left out. A point's field says its
    `dtype` and `shape` in its metadata; `plain` points are lists of float32 in place of tensors of float16 or of
    bfloat16's bits, which SQL and data frames can compute with, and copied.

    RequestError, a ValueError, if there is no such run or column; ValueError if the runs differ in points, shapes or
    dtypes; FileNotFoundError if there is no such source or session.
    """
    if isinstance(columns, str) or (columns is not None and not columns):
        raise ValueError("columns: name at least one, as a list")
    points = None if columns is None else {name for name in columns if name not in COLUMNS}
    files, wanted = chosen(source, session, runs, points or None)
    batches, schema, of = list[pa.RecordBatch](), None, ""
    layout = Layout((torch.bfloat16, torch.float16)) if plain else Layout(tensors=True)
    for run in select(files, wanted):
        if (names := _columns(run, columns)) is None:
            continue
        of_run = list(record_batches(run, names, layout))
        if schema is None:
            schema, of = of_run[0].schema, run.facts.run_id
        elif not schema.equals(of_run[0].schema, check_metadata=True):
            raise ValueError(
                f"columns: the runs {of!r} and {run.facts.run_id!r} differ in points, shapes or dtypes: name the "
                "columns that they share, or choose runs by session or runs"
            )
        batches += of_run
    if schema is None:
        raise ValueError("columns: no whole run has all of them")
    return pa.Table.from_batches(batches, schema)


def _columns(run: RunBatches, columns: Sequence[str] | None) -> list[str] | None:
    """The columns of a run's file that are meant; None where it lacks one."""
    schema = run.batches[0].schema
    if columns is None:
        return [*COLUMNS, *run.types]
    meant = [[name] if name in COLUMNS else list(Wanted(points=[name]).of(schema)) for name in columns]
    return list(dict.fromkeys(chain(*meant))) if all(meant) else None


def runs_table(
    source: str | os.PathLike[str], *, session: str | None = None, runs: Collection[str] | None = None
) -> pa.Table:
    """A row for each whole run: what it is, how many rows were captured and of which points; no tensor is read.

    `created` is in UTC, `tags` a map; `sampling` and `interventions` are JSON. Arguments and errors are as for `table`.
    """
    return pa.Table.from_pylist([_run(run) for run in select(*chosen(source, session, runs))], _RUNS)


class Layout(NamedTuple):
    """How points become columns."""

    widened: tuple[torch.dtype, ...] = ()  # values of these dtypes become float32, which holds each of them exactly
    tensors: bool = False  # as the files have them, else as lists
    nested: bool = False  # lists are nested as the points are shaped, and the phase is a string


def record_batches(run: RunBatches, names: Sequence[str], layout: Layout) -> Iterator[pa.RecordBatch]:
    """A run's rows with these columns; a point's field says its `dtype` and `shape` in its metadata."""
    for batch in run.batches:
        if batch.num_rows:
            rows, fields = batch.select(names), list[pa.Field]()
            arrays = [_array(name, rows[name], run.types.get(name), layout) for name in names]
            for name, array in zip(names, arrays, strict=True):
                kind = run.types.get(name)
                description = {"dtype": kind.dtype, "shape": json.dumps(kind.shape)} if kind else None
                fields.append(pa.field(name, array.type, metadata=description))
            yield pa.record_batch(arrays, schema=pa.schema(fields))


def _array(name: str, column: Any, kind: PointType | None, layout: Layout) -> pa.Array:
    if name == "role":
        column = pa.DictionaryArray.from_arrays(column, pa.array(ROLES, pa.string()))
    if kind is None:
        return column.cast(pa.string()) if layout.nested and pa.types.is_dictionary(column.type) else column
    if layout.tensors:
        return column
    rows, dtype = column.storage if isinstance(column, pa.ExtensionArray) else column, DTYPES[kind.dtype]
    flat = rows.flatten()
    if dtype in layout.widened:
        flat = pa.array(from_dlpack(flat).view(dtype).float().numpy())
    if isinstance(rows, pa.LargeListArray):
        return pa.LargeListArray.from_arrays(rows.offsets, flat)
    for size in reversed(kind.shape if layout.nested else [rows.type.list_size]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _run(run: RunBatches) -> Mapping[str, Any]:
    facts = run.facts
    given = {name: getattr(facts, name, None) for name in _RUNS.names}
    return given | {
        "created": round(facts.created * 1e6),
        "tags": list(facts.tags.items()),
        "rows": run.rows,
        "points": list(run.types),
        "sampling": json.dumps(facts.sampling),
        "interventions": json.dumps(facts.interventions),
        "logit_lens": json.dumps(facts.logit_lens),
    }
