"""Checksums of stored rows: one for each column of a batch but the words, so that damage is known by its point.

Each is XXH3 (64 bits, as 16 hex digits) over the column's values as they lie in the file: row by row, little-endian,
without offsets, padding or validity bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from xxhash import xxh3_64_hexdigest

KEY = "xxh3"  # of a batch's metadata: the sums, apart by commas, in the order of the columns that have one
_WORDS = ("run_id", "sample_id")  # the same in each row, and in the metadata


def summed(names: Sequence[str]) -> list[str]:
    """Those columns of a batch that have a checksum, in order."""
    return [name for name in names if name not in _WORDS]


def checksums(batch: pa.RecordBatch) -> dict[str, str]:
    """Each column's checksum by its name."""
    return {name: xxh3_64_hexdigest(_values(batch[name])) for name in summed(batch.schema.names)}


def written(sums: Mapping[str, str]) -> dict[str, str]:
    """Checksums as a batch's metadata says them; nothing where there are none."""
    return {KEY: ",".join(sums.values())} if sums else {}


def read(metadata: Mapping[bytes, bytes] | None, names: Sequence[str]) -> dict[str, str]:
    """The inverse of `written`; nothing for batches of a version that wrote none.

    Args:
        metadata: The batch's own.
        names: All of its columns.

    Raises:
        ValueError: There are not as many as columns.
    """
    said = (metadata or {}).get(KEY.encode())
    if said is None:
        return {}
    return dict(zip(summed(names), said.decode().split(","), strict=True))


def damaged(batch: pa.RecordBatch, sums: Mapping[str, str]) -> list[str]:
    """The columns of a batch whose values are not those that were written.

    Raises:
        pa.ArrowInvalid: What describes its columns is damaged.
    """
    batch.validate(full=True)  # Arrow trusts offsets, and would end the process
    return [name for name in sums if xxh3_64_hexdigest(_values(batch[name])) != sums[name]]


def _values(column: pa.Array) -> memoryview:
    """A column's values, of these rows alone."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if isinstance(column, pa.DictionaryArray):
        column = column.indices
    if pa.types.is_fixed_size_list(column.type) or pa.types.is_large_list(column.type):
        column = column.flatten()
    width = column.type.bit_width // 8
    data = column.buffers()[1]
    if data is None:
        return memoryview(b"")
    return memoryview(data).cast("B")[column.offset * width : (column.offset + len(column)) * width]
