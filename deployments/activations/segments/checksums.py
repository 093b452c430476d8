"""Checksums of stored data, each XXH3 of 64 bits as 16 hex digits.

Each column of a batch, except words, has its own, so that damage is reported by point. It covers the column's values as
they lie in the file: row by row, little-endian, without offsets, padding or validity bits. Further checksums cover the
rest: the layout of the columns, the facts of the run, and the schema with the batch's other metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64, xxh3_64_hexdigest

KEY = "xxh3"  # of a batch's metadata: the sums, apart by commas, in the order of the columns that have one
LAYOUT = "xxh3_layout"  # the same: of its columns' lengths, nulls and words
RUN = "xxh3_run"  # the same: of what the run is
BATCH = "xxh3_batch"  # the same: of the schema, and of all else in the metadata
_json = json.JSONEncoder(default=repr).encode  # a type that changed may be no word's
_FEW = 256  # rows for which Python is faster than a kernel of Arrow
_WORDS = ("run_id", "sample_id")  # the same in each row, and in the metadata


def summed(names: Sequence[str]) -> list[str]:
    """Those columns of a batch that have a checksum, in order."""
    return [name for name in names if name not in _WORDS]


def checksums(batch: pa.RecordBatch) -> dict[str, str]:
    """Each column's checksum by its name."""
    columns = zip(batch.schema.names, batch.columns, strict=True)
    return {name: xxh3_64_hexdigest(_values(column)) for name, column in columns if name not in _WORDS}


def written(sums: Mapping[str, str]) -> dict[str, str]:
    """Checksums as a batch's metadata says them; nothing where there are none."""
    return {KEY: ",".join(sums.values())} if sums else {}


def described(batch: pa.RecordBatch) -> dict[str, str]:
    """A batch's own checksums as its metadata says them."""
    return written(checksums(batch)) | {LAYOUT: layout(batch)}


def layout(batch: pa.RecordBatch) -> str:
    """The checksum of what the columns' own leave out: lengths, nulls, and words.

    It covers `[name, length]` or `[name, length, words]` of each column, as JSON, and the bits and lengths after it.
    """
    sum, rows = xxh3_64(), batch.num_rows
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        words = ""
        if name in _WORDS:
            words = f", {_json(_different(column))}"
        elif isinstance(column, pa.DictionaryArray):
            words = f", {_json(column.dictionary.to_pylist())}"
        sum.update(f"[{_json(name)}, {rows}{words}]".encode())  # a list as JSON takes several times as long
        if column.null_count:
            bits = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")
            sum.update(bits[column.offset : column.offset + len(column)].tobytes())
        if isinstance(column, pa.LargeListArray):
            sum.update(column.value_lengths().cast(pa.int64()).to_numpy().tobytes())
    return sum.hexdigest()


def _different(words: pa.Array) -> list[object]:
    """The different words of a column, in order."""
    if len(words) > _FEW or not pa.types.is_string(words.type):
        return words.unique().to_pylist()  # type: ignore[no-any-return]
    # Arrow's kernels release the interpreter's lock, and getting it back takes longer than this.
    return list(dict.fromkeys(words.to_pylist()))


def of_run(said: bytes) -> str:
    """The checksum of what a run is, as JSON."""
    return xxh3_64_hexdigest(said)


def of_batch(schema: bytes | memoryview, metadata: Mapping[str, str]) -> str:
    """The checksum of a batch's metadata, and of the file's schema, as its message lies there."""
    sum = xxh3_64(schema)
    sum.update(json.dumps([[key, value] for key, value in metadata.items() if key != BATCH]).encode())
    return sum.hexdigest()


def is_of_run(metadata: Mapping[bytes, bytes]) -> bool:
    """Whether the facts of a run in a batch are those that were written, as far as checksums cover them."""
    said = metadata.get(RUN.encode())
    return said is None or said == of_run(metadata.get(b"run", b"")).encode()


def read(metadata: Mapping[bytes, bytes] | None, names: Sequence[str]) -> dict[str, str]:
    """The inverse of `written`, by all columns' names; empty for a version that wrote none. ValueError if one lacks."""
    said = (metadata or {}).get(KEY.encode())
    if said is None:
        return {}
    return dict(zip(summed(names), said.decode().split(","), strict=True))


def damaged(batch: pa.RecordBatch, sums: Mapping[str, str]) -> list[str]:
    """The columns whose values are not those that were written; pa.ArrowInvalid if their layout is damaged."""
    batch.validate(full=True)  # Arrow trusts offsets, and would end the process
    return [name for name in sums if xxh3_64_hexdigest(_values(batch[name])) != sums[name]]


def _values(column: pa.Array) -> memoryview:
    """A column's values, of these rows alone."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if isinstance(column, pa.DictionaryArray):
        column = column.indices
    if isinstance(column, pa.FixedSizeListArray):
        size = column.type.list_size
        column = column.values[column.offset * size : (column.offset + len(column)) * size]
    elif isinstance(column, pa.LargeListArray):
        column = column.flatten()
    width = column.type.bit_width // 8
    data = column.buffers()[1]
    if data is None:
        return memoryview(b"")
    return memoryview(data).cast("B")[column.offset * width : (column.offset + len(column)) * width]
