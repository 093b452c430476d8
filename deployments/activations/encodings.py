"""Stored runs in other forms, each as its length and its bytes piece by piece: no more than a batch is in memory.

`arrow` is IPC streams, one for all runs that fit one table. The others are one file of named tensors.
"""

from __future__ import annotations

import io
import json
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

from deployments.activations.archives import File, archive, length
from deployments.activations.checksums import written
from deployments.activations.facts import COLUMNS, dtype_name
from deployments.activations.named_tensors import Member, Tensors
from deployments.activations.objects import AnyFile
from deployments.activations.schema import batch_metadata
from deployments.activations.selecting import Wanted, by_schema, select

_SAFETENSORS = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.int64: "I64",
}
_STORAGES = {
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
}


class Encoded(NamedTuple):
    """What a file or an answer holds.

    Attributes:
        length: Its bytes.
        pieces: Them, in order, as they are read.
    """

    length: int
    pieces: Iterator[bytes | memoryview]


def as_safetensors(found: Tensors) -> Encoded:
    """A safetensors file; the facts are its metadata."""
    # The widest values first, as safetensors' own writer has them, so that each tensor is aligned.
    members = sorted(found.members, key=lambda member: -member.dtype.itemsize)
    ends = np.cumsum([0, *(member.nbytes for member in members)]).tolist()
    header: dict[str, Any] = {"__metadata__": found.facts}
    for member, offsets in zip(members, pairwise(ends), strict=True):
        header[member.name] = {"dtype": _SAFETENSORS[member.dtype], "shape": member.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    def pieces() -> Iterator[bytes | memoryview]:
        yield head
        for member in members:
            yield from member.pieces()

    return Encoded(len(head) + ends[-1], pieces())


def as_npz(found: Tensors) -> Encoded:
    """A file for `numpy.load`; numpy has no bfloat16, which comes as float32. The facts say each point's own dtype."""
    files = list[File]()
    for member in (member.widened() for member in found.members):
        head = _npy_head(member)
        size = len(head) + member.nbytes
        files.append(File(f"{member.name}.npy", size, partial(_behind, head, member)))
    for name, text in found.facts.items():
        buffer = io.BytesIO()
        np.save(buffer, np.array(text))
        files.append(_file(f"{name}.npy", buffer.getvalue()))
    return Encoded(length(files), archive(files))


def as_pt(found: Tensors) -> Encoded:
    """A file for `torch.load`: a dict of the tensors, each `[1, rows, ...features]`, and of the facts."""
    return _pt({member.name: _Tensor(str(i), member) for i, member in enumerate(found.members)} | found.facts)


def as_lone_pt(member: Member) -> Encoded:
    """A file for `torch.load`: one tensor, `[1, rows, ...features]`."""
    return _pt(_Tensor("0", member))


def as_arrow(files: Sequence[AnyFile], wanted: Wanted) -> Encoded:
    """IPC streams one behind the other, each of all wanted runs that fit one table, as the files have them.

    Each batch's metadata says which run it is of, and a run's last one what the run is.
    """
    groups = [group for _, group in by_schema(files)]
    measure = _Sink(keeps=False)
    for _ in _streams(groups, wanted, measure):
        pass
    sink = _Sink(keeps=True)

    def pieces() -> Iterator[bytes | memoryview]:
        for _ in _streams(groups, wanted, sink):
            yield from sink.taken()

    return Encoded(measure.length, pieces())


ENCODERS: Mapping[str, Callable[[Tensors], Encoded]] = {
    "safetensors": as_safetensors,
    "npz": as_npz,
    "pt": as_pt,
}
"""Files of named tensors, by the name of their format."""


class _Sink:
    """What Arrow writes to: measures what it is given, and keeps it until it is taken."""

    closed = False

    def __init__(self, keeps: bool) -> None:
        self.length = 0
        self._keeps = keeps
        self._kept = list[memoryview]()

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.length += len(view)
        if self._keeps:
            self._kept.append(view)

    def taken(self) -> list[memoryview]:
        kept, self._kept = self._kept, []
        return kept

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """There is nothing to close."""


def _streams(groups: Sequence[Sequence[AnyFile]], wanted: Wanted, sink: _Sink) -> Iterator[None]:
    """Write the streams; stops after each batch."""
    for files in groups:
        writer = None
        for run in select(files, wanted):
            names = [name for name in run.batches[0].schema.names if name in COLUMNS or name in run.types]
            facts = batch_metadata(run.facts.run_id, 0, len(run.batches), run.facts)
            for batch, sums, metadata in zip(run.batches, run.sums, facts, strict=True):
                rows = batch.select(names)
                writer = writer or pa.ipc.new_stream(sink, rows.schema)
                kept = {name: sums[name] for name in names if name in sums}
                writer.write_batch(rows, custom_metadata=metadata | written(kept))
                yield
        if writer:
            writer.close()
            yield


class _Tensor(NamedTuple):
    """A tensor as torch pickles it: `key` names the file of the archive that holds its values."""

    key: str
    member: Member

    def __reduce__(self) -> tuple[Any, ...]:
        shape = (1, *self.member.shape)
        steps = [int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))]
        # torch's own form: storage, offset, shape, strides, requires_grad, hooks.
        return torch._utils._rebuild_tensor_v2, (_Storage(self), 0, shape, tuple(steps), False, OrderedDict())


class _Storage:
    """Stands for a tensor's values in what is pickled."""

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
        return "storage", _STORAGES[member.dtype], key, "cpu", member.values


def _pt(value: Any) -> Encoded:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    files = [_file("archive/data.pkl", buffer.getvalue()), _file("archive/byteorder", sys.byteorder.encode())]
    files += [File(f"archive/data/{key}", member.nbytes, member.pieces) for key, member in pickler.tensors]
    files.append(_file("archive/version", b"3\n"))
    return Encoded(length(files), archive(files))


def _file(name: str, data: bytes) -> File:
    return File(name, len(data), lambda: [data])


def _npy_head(member: Member) -> bytes:
    buffer = io.BytesIO()
    kind = np.lib.format.dtype_to_descr(np.dtype(dtype_name(member.dtype)))
    head = {"descr": kind, "fortran_order": False, "shape": member.shape}
    np.lib.format.write_array_header_1_0(buffer, head)
    return buffer.getvalue()


def _behind(head: bytes, member: Member) -> Iterator[bytes | memoryview]:
    yield head
    yield from member.pieces()
