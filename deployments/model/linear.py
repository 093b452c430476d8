"""Linear layers on a CPU, multiplied by oneDNN with weights in its own layout."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from deployments.model.device_memory import is_out_of_memory, unreserved_bytes
from deployments.model.switch import Switch
from deployments.tiles import in_tiles

SHARE = 0.1  # of the free memory, which the copies of the weights may take; replicas may load at the same time
AVAILABLE = torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64")  # not tried on other processors
ROWS = 32  # for which oneDNN chooses the layout; it suits any other number, too
# oneDNN compiles code for each number of rows and shape of weights, takes half a millisecond and half a MiB for it, and
# keeps it. So there are 50 numbers, each at most an eighth above the one before from 32 on.
SIZES = (
    *(1, 2, *range(4, 64, 4), *range(64, 128, 8), *range(128, 256, 16), *range(256, 512, 32)),
    *range(512, 1025, 64),
)
UNPADDED = frozenset(SIZES)


def replace_linear_layers(hf: nn.Module, name: str, switch: Switch) -> None:
    """Let a model's linear layers multiply by oneDNN while a switch is on.

    For the 32 rows of a decode that takes half of the time of MKL, which torch uses for float32, and two thirds of what
    torch takes for bfloat16, as it arranges the weights anew in each call; prompts gain less. The copies in oneDNN's
    layout take as much memory as the weights. Without free memory for them the weights are used as they are, in two
    thirds of MKL's time; 32 rows then have the same bits, which `batch_invariant` needs.

    The weights must not change any more.

    Args:
        hf: The Hugging Face module; layers on other devices stay as they are.
        name: The model's.
        switch: Turned on during forward passes of the engine.
    """
    layers: list[Any] = [module for module in hf.modules() if _supported(module)]
    # [outputs, inputs] each
    weights: Sequence[torch.Tensor] = [
        layer.weight if isinstance(layer, nn.Linear) else layer.weight.t() for layer in layers
    ]
    if sum(weight.nbytes for weight in weights) <= SHARE * unreserved_bytes(torch.device("cpu"), name):
        weights = _copies(weights)
    for layer, weight in zip(layers, weights, strict=True):
        layer.forward = functools.partial(_forward, switch, layer.forward, weight, layer.bias)


def _forward(
    switch: Switch,
    plain: Callable[..., torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *x: Any,
    **named: Any,
) -> torch.Tensor:
    """Multiply x [..., inputs] by oneDNN, where that is on; returns [..., outputs]."""
    if not switch.on or not x or x[0].dtype != weight.dtype or not x[0].numel():
        return plain(*x, **named)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")  # type: ignore[no-any-return]

    if x[0].numel() // x[0].shape[-1] in UNPADDED and x[0].is_contiguous():
        return product(x[0])  # as `in_tiles`, in a tenth less time
    return in_tiles(x[0], weight.shape[0], product, SIZES)


def _copies(weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The weights in oneDNN's layout; as they are, if there is no memory after all."""
    try:
        return [torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS) for weight in weights]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return weights


def _supported(layer: Any) -> bool:
    """Whether a module is a plain linear layer whose weights oneDNN can multiply here."""
    if type(layer).forward not in (nn.Linear.forward, Conv1D.forward) or "forward" in vars(layer):
        return False
    weight, tensors = layer.weight, [layer.weight, *([] if layer.bias is None else [layer.bias])]
    if any(type(tensor) is not nn.Parameter or tensor.dtype != weight.dtype for tensor in tensors):
        return False  # quantized, or computed from others
    if not AVAILABLE or weight.device.type != "cpu" or not weight.numel():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(weight.dtype == torch.float32)
