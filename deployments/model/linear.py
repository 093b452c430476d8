"""Linear layers on a CPU, multiplied by oneDNN with weights in its own layout."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from deployments.model.device_memory import free_bytes

SHARE = 0.25  # of the free memory, which the copies of the weights may take
AVAILABLE = torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64")  # not tried on other processors
ROWS = 32  # for which oneDNN chooses the layout; it suits any other number, too


class LinearLayers:
    """A model's linear layers, which use oneDNN during forward passes of the engine.

    For the 32 rows of a decode that takes half of the time of MKL, which torch uses for float32, and two thirds of what
    torch takes for bfloat16, as it arranges the weights anew in each call. The copies in oneDNN's layout take as much
    memory as the weights. Without free memory for them the weights are used as they are, in two thirds of MKL's time.

    Outside these forward passes the layers run as in transformers: clients' code can differentiate them.
    """

    def __init__(self, hf: nn.Module) -> None:
        """Find the layers that oneDNN can multiply, and copy their weights.

        Args:
            hf: The Hugging Face module; layers on other devices stay as they are.
        """
        self._used = False
        layers: list[Any] = [module for module in hf.modules() if _supported(module)]
        size = sum(layer.weight.nbytes for layer in layers)
        copies = size <= SHARE * free_bytes(torch.device("cpu"))
        for layer in layers:
            weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()  # [outputs, inputs]
            if copies:
                weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
            layer.forward = functools.partial(self._multiply, layer.forward, weight, layer.bias)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Multiply by oneDNN while open."""
        self._used = True
        try:
            yield
        finally:
            self._used = False

    def _multiply(
        self, plain: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Multiply x [..., inputs] by oneDNN, where that is on; returns [..., outputs]."""
        if self._used and x.dtype == weight.dtype and x.numel():
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
        return plain(x)


def _supported(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer whose weights oneDNN can multiply here."""
    if type(module).forward not in (nn.Linear.forward, Conv1D.forward) or "forward" in vars(module):
        return False
    weight: Any = module.weight
    if weight.device.type != "cpu" or not AVAILABLE:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(weight.dtype == torch.float32)
