"""The schema of a stored activation file: its columns, its metadata, the facts in both, and checksums.

A row is a captured token. Each point has a `fixed_shape_tensor` column named after it. Attention patterns, whose rows
grow, have a `large_list` column with `[heads, tokens seen]` for each token. `docs/data.md` describes all of it.
This module does not import torch, because a writer does not need it.

The checksum of a record batch is XXH3 of 64 bits, as 16 hex digits in the batch's metadata. It covers the values of
every column row by row, without offsets and padding, so that it does not depend on the version of Arrow that wrote
them; lengths, nulls and words; the columns' names; the file's facts in the schema's metadata; and the batch's other
metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64, xxh3_64_hexdigest

from deployments.activations.facts import FileInfo, PointType, RunInfo
from deployments.points.names import COLUMNS

FORMAT = 5
PHASES = ("prompt", "generated")
METADATA_KEY = b"vitrine"
CHECKSUM = "xxh3"  # of a batch's metadata
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
    facts = _facts_of(schema)
    return FileInfo(**{item.name: facts[item.name] for item in fields(FileInfo) if item.name in facts})


def point_types(schema: pa.Schema) -> dict[str, PointType]:
    """Each point's feature shape and dtype; ValueError if `to_batch` did not make the schema."""
    facts = _facts_of(schema)
    names = [name for name in schema.names if name not in COLUMNS]
    try:
        heads, dtypes = facts.get("heads", {}), facts["dtypes"]
        shapes = [(heads[name], None) if name in heads else tuple(schema.field(name).type.shape) for name in names]
        return {name: PointType(shape, dtypes[name]) for name, shape in zip(names, shapes, strict=True)}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("Not a Vitrine activation schema: its points are not described") from error


def _facts_of(schema: pa.Schema) -> Mapping[str, Any]:
    metadata: dict[bytes, bytes] = schema.metadata or {}
    if METADATA_KEY not in metadata:
        raise ValueError("Not a Vitrine activation schema: its metadata has no 'vitrine'")
    return _parsed(metadata[METADATA_KEY])


@lru_cache(64)  # the same few schemas come with every batch
def _parsed(text: bytes) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = json.loads(text)
    return facts


def free_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch's rows with a dictionary that shares no memory with them: a file's writer keeps its first batch's."""
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


class Packed:
    """A batch as an Arrow stream, which is the batch again once unpickled, over the same memory.

    Ray pickles the columns of a batch one by one: with 30 points that takes 0.5 ms longer, and reading twice as long.
    But a stream is a copy, so a batch of megabytes is better pickled as it is.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        self._stream = sink.getvalue()

    @property
    def nbytes(self) -> int:
        """The bytes of the stream."""
        return int(self._stream.size)

    def __reduce__(self) -> tuple[Callable[[pa.Buffer], pa.RecordBatch], tuple[pa.Buffer]]:
        return _unpacked, (self._stream,)


def _unpacked(stream: pa.Buffer) -> pa.RecordBatch:
    return pa.ipc.open_stream(stream).read_next_batch()


def checksum(content: str, metadata: Mapping[str, str]) -> str:
    """The checksum of a batch: of what `of_content` gives, and of its metadata, in which `CHECKSUM` does not count."""
    words = sorted((key, value) for key, value in metadata.items() if key != CHECKSUM)
    return xxh3_64_hexdigest(json.dumps([content, words]).encode())


def of_content(batch: pa.RecordBatch) -> str:
    """The checksum of a batch without its metadata, 16 hex digits.

    A batch from a file must have been validated: Arrow trusts offsets.
    """
    sum = xxh3_64((batch.schema.metadata or {}).get(METADATA_KEY, b""))
    sum.update(json.dumps([batch.num_rows, batch.schema.names]).encode())
    for column in batch.columns:
        for part in _parts(column):
            sum.update(part)
    return sum.hexdigest()


def is_intact(batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> bool:
    """Whether a batch is as it was written."""
    try:
        words = {key.decode(): value.decode() for key, value in metadata.items()}
    except UnicodeDecodeError:
        return False
    return words.get(CHECKSUM) == checksum(of_content(batch), words)


def _parts(column: pa.Array) -> Iterator[Any]:
    """What a column holds, as buffers of these rows alone."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if column.null_count:
        bits = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")
        yield bits[column.offset : column.offset + len(column)].tobytes()
    if isinstance(column, pa.DictionaryArray):
        yield json.dumps(column.dictionary.to_pylist(), default=repr).encode()
        yield from _parts(column.indices)
    elif isinstance(column, pa.FixedSizeListArray):
        size = column.type.list_size
        yield _values(column.values, column.offset * size, len(column) * size)
    elif isinstance(column, pa.LargeListArray):
        offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column) + 1]
        yield (offsets - offsets[0]).tobytes()
        yield _values(column.values, int(offsets[0]), int(offsets[-1] - offsets[0]))
    elif pa.types.is_string(column.type):
        data = column.buffers()[2]
        ends = np.frombuffer(column.buffers()[1] or b"", np.int32)[column.offset : column.offset + len(column) + 1]
        if len(ends):
            yield (ends - ends[0]).tobytes()
            yield memoryview(data or b"")[int(ends[0]) : int(ends[-1])]
    else:
        yield _values(column, 0, len(column))


def _values(column: pa.Array, first: int, count: int) -> memoryview:
    """`count` values of an array of numbers, from its value `first` on."""
    data = column.buffers()[1]
    if data is None:
        return memoryview(b"")
    width = column.type.bit_width // 8
    begin = (column.offset + first) * width
    return memoryview(data).cast("B")[begin : begin + count * width]
