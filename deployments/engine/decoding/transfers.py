"""Small results and settings between host and device: one copy each way, and the host waits only where it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNED = 16  # bytes; each array in a packed buffer starts at a multiple

Array = npt.NDArray[Any]


def to_device(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device in one upload, without waiting for it; on the CPU, tensors share their memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return packed(arrays, device)


def packed(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device in one buffer, pinned for CUDA. Not run on a GPU yet."""
    sizes = [-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    tensors = [torch.from_numpy(array) for array in arrays]
    for part, tensor in zip(torch.split(buffer, sizes), tensors, strict=True):
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    parts = zip(torch.split(buffer.to(device, non_blocking=True), sizes), tensors, strict=True)
    return [part[: like.nbytes].view(like.dtype).view(like.shape) for part, like in parts]


class Download:
    """Named tensors on their way to the host in one copy.

    They travel as one int32 tensor of their bits. On CUDA, the copy into pinned memory starts at once, so that reading
    does not wait for later work on the device. Not run on a GPU yet.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start the copy.

        Args:
            tensors: Name -> values of int64 or float32, all on one device, the last dimension contiguous.
        """
        self._tensors = tensors
        words = [tensor.view(torch.int32) for tensor in tensors.values()]  # of one dtype: a single kernel joins them
        self._values = torch.cat([part if part.ndim == 1 else part.reshape(-1) for part in words])
        self._copied: torch.cuda.Event | None = None
        if self._values.is_cuda:
            pinned = torch.empty(self._values.shape, dtype=self._values.dtype, pin_memory=True)
            pinned.copy_(self._values, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self._values.device))
            self._values = pinned

    def read(self) -> dict[str, Array]:
        """Wait for the copy; returns the values by name."""
        if self._copied:
            self._copied.synchronize()
        words, arrays, start = self._values.numpy(), dict[str, Array](), 0
        for name, tensor in self._tensors.items():
            stop = start + tensor.nbytes // words.itemsize
            array = words[start:stop].view(np.int64 if tensor.dtype == torch.int64 else np.float32)
            arrays[name], start = array if tensor.ndim == 1 else array.reshape(tensor.shape), stop
        return arrays
