"""Stored runs encoded as safetensors, npz, pt and Arrow files, in parts that are read on demand."""

from __future__ import annotations

import io
import json
import math
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from deployments.activations.export.named_tensors import Member, Tensors
from deployments.activations.export.parts import Buffer, Part, Parts, archive
from deployments.activations.facts import StoreError
from deployments.activations.files.places import File
from deployments.activations.reader.selection import Wanted, by_schema, select
from deployments.activations.segments.batches import Batch
from deployments.activations.segments.checksums import written
from deployments.activations.segments.schema import batch_metadata
from deployments.activations.segments.segments import WholeRun
from deployments.points.names import COLUMNS, dtype_name

_TYPES = {  # by dtype, what safetensors and torch's pickles call it
    torch.float16: ("F16", torch.HalfStorage),
    torch.bfloat16: ("BF16", torch.BFloat16Storage),
    torch.float32: ("F32", torch.FloatStorage),
    torch.float64: ("F64", torch.DoubleStorage),
    torch.int32: ("I32", torch.IntStorage),
    torch.int64: ("I64", torch.LongStorage),
}


def as_safetensors(found: Tensors) -> Parts:
    """A safetensors file; the facts are its metadata."""
    # The widest values first, as safetensors' own writer orders them, so that each tensor is aligned.
    members = sorted(found.members, key=lambda member: -member.dtype.itemsize)
    ends = np.cumsum([0, *(member.nbytes for member in members)]).tolist()
    header: dict[str, Any] = {"__metadata__": found.facts}
    for member, offsets in zip(members, pairwise(ends), strict=True):
        header[member.name] = {"dtype": _TYPES[member.dtype][0], "shape": member.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return Parts([Part.known(head), *(part for member in members for part in member.parts())])


def as_npz(found: Tensors) -> Parts:
    """A file for `numpy.load`. numpy has no bfloat16, which becomes float32; the facts give each point's own dtype."""
    files = list[tuple[str, Parts]]()
    for member in found.members:
        if member.dtype == torch.bfloat16:
            member = member._replace(dtype=torch.float32)
        buffer = io.BytesIO()
        kind = np.lib.format.dtype_to_descr(np.dtype(dtype_name(member.dtype)))
        np.lib.format.write_array_header_1_0(buffer, {"descr": kind, "fortran_order": False, "shape": member.shape})
        files.append((f"{member.name}.npy", Parts([Part.known(buffer.getvalue()), *member.parts()])))
    for name, text in found.facts.items():
        buffer = io.BytesIO()
        np.save(buffer, np.array(text))
        files.append((f"{name}.npy", Parts([Part.known(buffer.getvalue())])))
    return archive(files)


def as_pt(found: Tensors) -> Parts:
    """A file for `torch.load`: a dict of the tensors, each `[1, rows, ...features]`, and of the facts."""
    return _pt({member.name: _Tensor(str(i), member) for i, member in enumerate(found.members)} | found.facts)


def as_lone_pt(member: Member) -> Parts:
    """A file for `torch.load`: one tensor `[1, rows, ...features]`."""
    return _pt(_Tensor("0", member))


ENCODERS: dict[str, Callable[[Tensors], Parts]] = {"safetensors": as_safetensors, "npz": as_npz, "pt": as_pt}
"""By format, for one file of named tensors."""


class _Tensor(NamedTuple):
    """A tensor that is pickled as torch does; `key` names the file in the archive with its values."""

    key: str
    member: Member

    def __reduce__(self) -> tuple[Any, ...]:
        shape = (1, *self.member.shape)
        steps = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        # The arguments are storage, offset, shape, strides, requires_grad, hooks.
        return torch._utils._rebuild_tensor_v2, (_Storage(self), 0, shape, steps, False, OrderedDict())


class _Storage:
    """A placeholder for a tensor's values in the pickle."""

    def __init__(self, tensor: _Tensor) -> None:
        self.tensor = tensor


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors = list[_Tensor]()

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        key, member = obj.tensor
        self.tensors.append(obj.tensor)
        return "storage", _TYPES[member.dtype][1], key, "cpu", math.prod(member.shape)


def _pt(value: Any) -> Parts:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    head = {"data.pkl": buffer.getvalue(), "byteorder": sys.byteorder.encode(), "version": b"3\n"}
    files = [(f"archive/{name}", Parts([Part.known(text)])) for name, text in head.items()]
    return archive([*files, *((f"archive/data/{key}", Parts(member.parts())) for key, member in pickler.tensors)])


def as_arrow(files: Sequence[File], wanted: Wanted, left: set[str] | None = None) -> Parts:
    """Concatenated Arrow IPC streams, each with all wanted runs of one schema.

    Each batch's metadata names its run, and a run's last one has its facts. Only the lengths of batches are in memory:
    a run is looked up in its file again when it is read.

    Args:
        files: The files.
        wanted: Which runs and points.
        left: As for `select`.
    """
    parts = list[Part]()
    for _, group in by_schema(files):
        sink, writer = _Sink(), None
        for run in select(group, wanted, left):
            sizes = list[int]()
            for number in range(len(run.batches)):
                rows, metadata = _outline(run, number)
                writer = writer or pa.ipc.new_stream(sink, rows.schema)
                writer.write_batch(rows, custom_metadata=metadata)
                sizes.append(sink.taken().length)
            alone = wanted._replace(runs={run.facts.run_id}, offsets={run.file: run.offset})
            parts.append(Part(sum(sizes), partial(_messages, run.file, alone, tuple(sizes))))
        if writer:
            writer.close()
            parts.append(Part.known(b"".join(sink.taken().read())))
    return Parts(parts)


class _Sink:
    """A file object for Arrow that collects what is written as parts.

    Values of points are not copied: their parts read them from the segment.

    Args:
        batch: The batch that is written.
        places: Byte offsets of its points' values in the segment, by their addresses in memory.
    """

    closed = False

    def __init__(self, batch: Batch | None = None, places: Mapping[int, int] | None = None) -> None:
        self._parts = list[Part]()
        self._batch, self._places = batch, places or {}

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        at = self._places.get(data.address) if isinstance(data, pa.Buffer) else None
        if self._batch is None or at is None:
            self._parts.append(Part.known(view))
        else:
            self._parts.append(Part(len(view), partial(_piece, self._batch, at)))

    def taken(self) -> Parts:
        """What was written since the last call."""
        parts, self._parts = self._parts, []
        return Parts(parts)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """There is nothing to close."""


def _piece(batch: Batch, at: int, first: int, end: int) -> Iterator[Buffer]:
    yield batch.read(at + first, end - first)


def _outline(run: WholeRun, number: int) -> tuple[pa.RecordBatch, dict[str, str]]:
    """A batch of a run with the wanted points, without their values, and its metadata."""
    batch, sums = run.batches[number], run.sums[number]
    names = [name for name in batch.schema.names if name in COLUMNS or name in run.types]
    is_last = number + 1 == len(run.batches)
    (metadata,) = batch_metadata(run.facts.run_id, number, 1, run.facts if is_last else None)
    return batch.outline(names), metadata | written({name: sums[name] for name in names if name in sums})


def _messages(file: File, wanted: Wanted, sizes: Sequence[int], first: int, end: int) -> Iterator[Buffer]:
    """Bytes `first` to `end` of a run's messages in a stream, given the messages' sizes.

    Raises:
        StoreError: The run has changed since the sizes were computed.
    """
    run = next(select([file], wanted), None)
    if run is None or len(run.batches) != len(sizes):
        raise StoreError(f"{file} changed while it was read")
    begins = 0
    for number, size in enumerate(sizes):
        if begins < end and first < begins + size:
            rows, metadata = _outline(run, number)
            sink = _Sink(batch := run.batches[number], batch.places(rows))
            writer = pa.ipc.new_stream(sink, rows.schema)
            writer.write_batch(rows, custom_metadata=metadata)
            alone = sink.taken()
            writer.close()
            # A new stream begins with the schema and the dictionary of phases, which the real one has had before.
            before = alone.length - size
            yield from alone.read(before + max(first - begins, 0), before + min(end - begins, size))
        begins += size
