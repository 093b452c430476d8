"""One copy of a model's weights shared by several processes: the replica and those that run clients' code."""

from __future__ import annotations

import fcntl
import io
import os
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

ALIGNMENT = 64  # bytes, as in torch's allocator on a CPU
F_SEAL_FUTURE_WRITE = 0x10  # from Linux 5.1; missing in Python's fcntl
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class _TensorPlace:
    """The storage of one tensor: an offset in the file or, on a GPU, a pickled IPC handle."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0  # bytes
    handle: bytes | None = None


@dataclass(frozen=True)
class SharedWeights:
    """A module without its tensors, and the storage of these.

    Another process maps them copy on write: it reads the module's weights without a copy, and its writes stay private.
    A GPU has no such mapping: writes change the weights themselves.

    Attributes:
        fd: An anonymous file in memory with all tensors of the CPU, sealed against later writers.
        size: Its length in bytes.
        parts: The storage of each tensor.
        skeleton: The pickled module, with tensors as indices of parts.
    """

    fd: int
    size: int
    parts: tuple[_TensorPlace, ...]
    skeleton: bytes

    @classmethod
    def of(cls, module: torch.nn.Module) -> SharedWeights:
        """Move a module's tensors into memory that others can map; the module, without hooks, uses them there.

        Raises:
            OSError: There is no memory for it.
            ValueError: It has something that other processes cannot use, such as modules spread over devices.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        try:
            pickler.dump(module)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ValueError(f"it cannot be shared with other processes, as clients' code needs: {error}") from error
        offsets, size = [], 0
        for tensor in pickler.tensors:
            offsets.append(size)
            if tensor.device.type == "cpu":
                size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        fd = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, max(size, 1))
        storage = _mapped(fd, size, shared=True)
        parts = tuple(_move(*item, storage) for item in zip(pickler.tensors, offsets, strict=True))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return cls(fd, size, parts, buffer.getvalue())

    @property
    def on_gpu(self) -> bool:
        """Whether any tensor is on a GPU."""
        return any(part.handle is not None for part in self.parts)

    def mapped(self, fd: int) -> torch.UntypedStorage:
        """Map the CPU's tensors copy on write in another process, where the file has this descriptor."""
        return _mapped(fd, self.size, shared=False)

    def module(self, storage: torch.UntypedStorage) -> Any:
        """The module on the storage from `mapped`, ready for gradients."""
        return _Unpickler(io.BytesIO(self.skeleton), self.parts, storage).load()


def _mapped(fd: int, size: int, shared: bool) -> torch.UntypedStorage:
    mapped: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", shared, size)
    return mapped  # type: ignore[no-any-return]


def _move(tensor: torch.Tensor, offset: int, storage: torch.UntypedStorage) -> _TensorPlace:
    shape = tuple(tensor.shape)
    if tensor.device.type != "cpu":
        handle = pickle.dumps(reduce_tensor(tensor.detach()))  # type: ignore[no-untyped-call]
        return _TensorPlace(tensor.dtype, shape, tensor.stride(), handle=handle)
    span = 1 + sum((length - 1) * step for length, step in zip(shape, tensor.stride(), strict=True))
    dense = tensor if span == tensor.numel() else tensor.contiguous()  # otherwise it has gaps or overlaps
    part = _TensorPlace(tensor.dtype, shape, dense.stride(), offset)
    moved = _at(part, storage)
    moved.copy_(tensor.detach())
    tensor.data = moved
    return part


def _at(part: _TensorPlace, storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=part.dtype)
    return empty.set_(storage, part.offset // part.dtype.itemsize, part.shape, part.stride)


class _Pickler(pickle.Pickler):
    """Pickles a tensor as its index in order of occurrence, and whether it is a parameter."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self._numbers: dict[int, int] = {}  # by the tensor's identity
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> tuple[int, bool] | None:
        """The id of a tensor; None for other objects, which are pickled as usual."""
        if not isinstance(value, torch.Tensor):
            return None
        if type(value) not in (torch.Tensor, torch.nn.Parameter):  # its class has more than the numbers
            raise pickle.PicklingError(f"its weights are quantized, as {type(value).__name__}")
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)], isinstance(value, torch.nn.Parameter)


class _Unpickler(pickle.Unpickler):
    """Unpickles modules that this project's replica has written."""

    def __init__(self, file: io.BytesIO, parts: tuple[_TensorPlace, ...], storage: torch.UntypedStorage) -> None:
        super().__init__(file)
        self._parts = parts
        self._storage = storage
        self._found: dict[int, torch.Tensor] = {}  # so that tied weights stay tied

    def persistent_load(self, pid: tuple[int, bool]) -> torch.Tensor:
        """The tensor of an index."""
        number, is_parameter = pid
        if number not in self._found:
            tensor = self._tensor(self._parts[number])
            if is_parameter:
                tensor = torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            self._found[number] = tensor
        return self._found[number]

    def _tensor(self, part: _TensorPlace) -> torch.Tensor:
        if part.handle is None:
            return _at(part, self._storage)
        rebuild, args = pickle.loads(part.handle)  # noqa: S301 - written by the replica
        return rebuild(*args)  # type: ignore[no-any-return]
