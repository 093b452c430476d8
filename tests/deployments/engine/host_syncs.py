"""Where code makes the host wait for a device, found on the CPU: reads of tensors, and uploads of Python lists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

ROOT, TORCH = Path(__file__).resolve().parents[3], str(Path(torch.__file__).parent)
READS = "item tolist cpu numpy nonzero masked_select unique __array__ __bool__ __int__ __float__ __index__ __contains__"


class HostSyncs(TorchFunctionMode):
    """Lists each synchronization in the block, of this thread and below a folder of the repository.

    These are reads of a tensor's values, indices that are lists, arrays, masks or scalar tensors, moves to "cpu", and
    `torch.tensor` with a device. Values that are on the host for good count too, unless they are kept in numpy.
    """

    def __init__(self, within: str = "deployments") -> None:
        super().__init__()
        self.within, self.seen = ROOT / within, list[str]()  # "file:line name"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, frame = kwargs or {}, func.__name__, sys._getframe(1)
        while frame.f_back and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        waits = (
            name in READS.split()
            or (name in ("__getitem__", "__setitem__") and _syncs(args[1]))
            or (name == "to" and "cpu" in (*args[1:2], kwargs.get("device")))
            or (name in ("tensor", "as_tensor") and "device" in kwargs)
        )
        if waits and path.is_relative_to(self.within):
            self.seen.append(f"{path.relative_to(ROOT)}:{frame.f_lineno} {name}")
        return func(*args, **kwargs)


def _syncs(index: Any) -> bool:
    """Whether indexing by this waits: an index on the host, or one whose values set the result's shape or offset."""
    if isinstance(index, torch.Tensor):
        return index.dtype in (torch.bool, torch.uint8) or index.ndim == 0
    return any(map(_syncs, index)) if isinstance(index, tuple) else isinstance(index, list | np.ndarray | range)
