"""The checksum of a record batch: XXH3 of 64 bits, as 16 hex digits in the batch's metadata.

It covers all that a batch says: the values of every column row by row, without offsets and padding, so that it does not
depend on the version of Arrow that wrote them; lengths, nulls and words; the columns' names; what the schema's metadata
says of the file; and the batch's other metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64, xxh3_64_hexdigest

KEY = "xxh3"  # of a batch's metadata
_SCHEMA = b"vitrine"  # of the schema's metadata


def checksum(content: str, metadata: Mapping[str, str]) -> str:
    """The checksum of a batch: of what `of_content` gives, and of its metadata, in which `KEY` does not count."""
    said = sorted((key, value) for key, value in metadata.items() if key != KEY)
    return xxh3_64_hexdigest(json.dumps([content, said]).encode())


def of_content(batch: pa.RecordBatch) -> str:
    """The checksum of a batch without its metadata, 16 hex digits.

    A batch from a file must have been validated: Arrow trusts offsets.
    """
    sum = xxh3_64((batch.schema.metadata or {}).get(_SCHEMA, b""))
    sum.update(json.dumps([batch.num_rows, batch.schema.names]).encode())
    for column in batch.columns:
        for part in _parts(column):
            sum.update(part)
    return sum.hexdigest()


def is_intact(batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> bool:
    """Whether a batch is as it was written."""
    try:
        said = {key.decode(): value.decode() for key, value in metadata.items()}
    except UnicodeDecodeError:
        return False
    return said.get(KEY) == checksum(of_content(batch), said)


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
