"""The columns of a stored activation file: captured rows as Arrow batches over torch's memory, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from deployments.activations.facts import FileInfo, PointType
from deployments.activations.segments.schema import FORMAT, METADATA_KEY, PHASE_WORDS
from deployments.points.names import COLUMNS, dtype_name
from deployments.points.patterns import Patterns

_ARROW_TYPES = {  # Arrow has no bfloat16: its bits go as uint16
    torch.bfloat16: pa.uint16(),
    torch.float16: pa.float16(),
    torch.float32: pa.float32(),
    torch.float64: pa.float64(),
    torch.int32: pa.int32(),
    torch.int64: pa.int64(),
}
DTYPES = {dtype_name(dtype): dtype for dtype in _ARROW_TYPES}  # by what a file's metadata calls them


def to_batch(
    segment: FileInfo,
    *,
    run_id: str,
    sample_id: str | None,
    positions: Sequence[int],
    token_ids: Sequence[int],
    prompt_tokens: int,
    points: Mapping[str, torch.Tensor | Patterns],
    text_offsets: Sequence[int] | None = None,
    roles: Sequence[int] | None = None,
    turns: Sequence[int] | None = None,
) -> pa.RecordBatch:
    """Lay captured rows out as one record batch, without copying contiguous tensors.

    Of each row come its position in prompt + generated, its token and its `text_offset` (characters before it, special
    tokens included; null where not known), role (its index in `ROLES`) and turn (its message, -1 for none; both null
    where not known), all `[rows]`; tokens from position `prompt_tokens` on count as generated.
    `points` are CPU tensors `[rows, ...features]`, or patterns; bfloat16 is kept as its bits. ValueError if there are
    no rows, lengths differ, or a name, shape, device or dtype is unfit.
    """
    rows = len(positions)
    offsets = pa.nulls(rows, pa.int32()) if text_offsets is None else pa.array(text_offsets, pa.int32())
    if not rows or len(token_ids) != rows or len(offsets) != rows:
        counts = f"{rows} positions, {len(token_ids)} token ids and {len(offsets)} text offsets"
        raise ValueError(f"{counts}: need as many, and at least one")
    columns = {name: _column(name, value, positions) for name, value in points.items()}
    index = np.asarray(positions, dtype=np.int32)
    fixed = (
        pa.repeat(pa.scalar(run_id, pa.string()), rows),
        pa.repeat(pa.scalar(sample_id, pa.string()), rows),
        pa.array(index),
        pa.DictionaryArray.from_arrays((index >= prompt_tokens).astype(np.int8), PHASE_WORDS),
        pa.array(np.asarray(token_ids, dtype=np.int32)),
        offsets,
        pa.nulls(rows, pa.int8()) if roles is None else pa.array(np.asarray(roles, dtype=np.int8)),
        pa.nulls(rows, pa.int16()) if turns is None else pa.array(np.asarray(turns, dtype=np.int16)),
    )
    dtypes = {name: dtype_name(value.dtype) for name, value in points.items()}
    heads = {name: value.heads for name, value in points.items() if isinstance(value, Patterns)}
    facts = json.dumps({"format": FORMAT, **vars(segment), "dtypes": dtypes, "heads": heads}, sort_keys=True)
    batch = pa.record_batch([*fixed, *columns.values()], names=[*COLUMNS, *columns])
    return batch.replace_schema_metadata({METADATA_KEY: facts})


def _column(name: str, value: torch.Tensor | Patterns, positions: Sequence[int]) -> pa.Array:
    """A point's rows as a column over the same memory."""
    if name in COLUMNS:
        raise ValueError(f"A point cannot be named {name!r}: the files have a column of that name")
    rows = len(positions)
    if isinstance(value, torch.Tensor):
        if value.ndim < 2 or value.shape[0] != rows or 0 in value.shape:
            raise ValueError(f"{name}: shape {tuple(value.shape)} is not [{rows}, ...features]")
        flat = _flat(name, value)
        kind = _tensor_type(flat.type, value.shape[1:])
        return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(flat, len(flat) // rows))
    if list(value.positions) != list(positions):
        raise ValueError(f"{name}: patterns at {value.positions} are not those of the rows")
    ends = np.cumsum(np.arange(value.positions.start, value.positions.stop, dtype=np.int64) + 1)
    offsets = np.concatenate([[0], value.heads * ends])
    return pa.LargeListArray.from_arrays(pa.array(offsets), _flat(name, value.values))


@lru_cache(256)
def _tensor_type(of: pa.DataType, shape: torch.Size) -> pa.FixedShapeTensorType:
    return pa.fixed_shape_tensor(of, shape)


def _flat(name: str, tensor: torch.Tensor) -> pa.Array:
    """A tensor's values, over the same memory."""
    if tensor.device.type != "cpu" or tensor.dtype not in _ARROW_TYPES:
        raise ValueError(f"{name}: {tensor.dtype} on {tensor.device} cannot be stored as it is")
    values = tensor.detach().contiguous()
    buffer = pa.foreign_buffer(values.data_ptr(), values.nbytes, values)  # numpy between the two would take longer
    return pa.Array.from_buffers(_ARROW_TYPES[tensor.dtype], values.numel(), [None, buffer])


def to_tensor(column: pa.FixedShapeTensorArray, dtype: str) -> torch.Tensor:
    """The inverse of a point's column: `[rows, ...features]` of the true dtype, over the same memory."""
    # DLPack carries no read-only flag, so torch does not warn of one as it does over numpy.
    flat = from_dlpack(column.storage.flatten())
    return flat.view(DTYPES[dtype]).reshape(len(column), *column.type.shape)


def to_patterns(column: pa.LargeListArray, kind: PointType, first: int) -> Patterns:
    """The inverse of a column of patterns of consecutive tokens from position `first` on, over the same memory."""
    values = from_dlpack(column.flatten()).view(DTYPES[kind.dtype])
    return Patterns(values, kind.shape[0] or 0, range(first, first + len(column)))
