"""Stored rows as a Hugging Face dataset on disk, which `datasets.load_from_disk` opens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from deployments.activations.facts import PointType
from deployments.activations.reader.tables import widened
from deployments.activations.segments.batches import Batch
from deployments.activations.segments.schema import point_types
from deployments.activations.segments.segments import WholeRun


def check_installed() -> None:
    """Refuse, before anything is written, where there is no `datasets`.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise ValueError("the format hf needs the package datasets: pip install datasets") from error


def write_dataset(folder: Path, runs: Iterator[WholeRun]) -> None:
    """Write runs whose rows fit one table, batch by batch.

    Args:
        folder: The dataset's; it does not exist.
        runs: At least one.
    """
    import datasets

    first = next(runs)
    schema, points = first.batches[0].schema, point_types(first.batches[0].schema)
    fields = [field for field in schema if field.name in first.types or field.name not in points]
    features = datasets.Features({field.name: _feature(field, first.types.get(field.name)) for field in fields})
    # The library writes datasets from what it maps: so the rows lie beside it once, until it is done.
    rows = folder.with_name(f"{folder.name}.rows")
    try:
        with pa.ipc.new_stream(str(rows), features.arrow_schema) as writer:
            for run in chain([first], runs):
                for batch in run.batches:
                    writer.write_batch(_batch(batch, run, features.arrow_schema))
        with _silent():
            datasets.Dataset.from_file(str(rows)).save_to_disk(str(folder))
    finally:
        rows.unlink(missing_ok=True)


def _feature(field: pa.Field, kind: PointType | None) -> Any:
    from datasets import LargeList, List, Value

    if kind is None:
        return Value("string" if pa.types.is_dictionary(field.type) else str(field.type))
    feature: Any = Value("float32" if kind.dtype == "bfloat16" else kind.dtype)
    if None in kind.shape:
        return LargeList(feature)
    for size in reversed(kind.shape):
        feature = List(feature, length=size)
    return feature


def _batch(batch: Batch, run: WholeRun, schema: pa.Schema) -> pa.RecordBatch:
    columns = [_column(batch[name], run.types.get(name), schema.field(name).type) for name in schema.names]
    return pa.record_batch(columns, schema=schema)


def _column(column: Any, kind: PointType | None, type: pa.DataType) -> pa.Array:
    if kind is None:
        return column.cast(type)
    rows = widened(column, kind, (torch.bfloat16,))
    if len(kind.shape) < 2 or None in kind.shape:
        return rows.cast(type)  # the same values; an item's name differs
    flat = rows.flatten()
    for size in reversed(kind.shape):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """No bars on stderr, as the other formats draw none."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    drawn = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if drawn:
            enable_progress_bars()
