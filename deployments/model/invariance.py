"""Batch invariance: a sequence gets the same bits alone and in any batch.

Libraries choose the order of a sum by the shape of a matrix product. Linear layers here multiply rows in tiles of one
fixed size, so that each row has the same bits whatever the other rows. The attention kernel computes each row by
itself. Elementwise functions treat the end of a loop differently, so each row is padded to whole vectors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from deployments.model.native import kernel
from deployments.model.packing import UnsupportedModelError
from deployments.tiles import in_tiles

ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
VECTOR = 64  # numbers that torch's elementwise loops take at once, at most; what is left over goes another way
ALONE = 32768  # numbers up to which such a loop is one thread's


def make_batch_invariant(hf: Any, packs: bool) -> None:
    """Have a model give each row the same bits whatever other rows a forward has.

    Args:
        hf: The Hugging Face module, changed in place.
        packs: Whether its sequences share forwards.

    Raises:
        UnsupportedModelError: Something in it sums in an order that depends on other rows.
    """
    if not packs:
        raise UnsupportedModelError("batch_invariant needs a model whose sequences share forwards; this one's do not")
    if hf.device.type != "cpu" or kernel(hf.dtype) is None:
        raise UnsupportedModelError(
            "batch_invariant needs the attention kernel: a CPU, float32 or bfloat16, and a C compiler (cc)"
        )
    for name, module in hf.named_modules():
        if isinstance(module, nn.Linear):
            module.forward = functools.partial(_linear, module)  # type: ignore[method-assign]
        elif isinstance(module, Conv1D):
            module.forward = functools.partial(_conv1d, module)  # type: ignore[method-assign]
        elif type(module).__module__ in ACTIVATIONS:
            module.forward = functools.partial(_by_vectors, module.forward)
        elif any(weight.ndim > 2 for weight in module.parameters(recurse=False)):
            message = (
                f"batch_invariant does not hold for {name} ({type(module).__name__}), because it multiplies "
                "rows in groups"
            )
            raise UnsupportedModelError(message)


def _by_vectors(function: Any, x: torch.Tensor) -> torch.Tensor:
    """An elementwise function of rows x [..., features], each number by the same vector instructions."""
    width = x.shape[-1]
    rows = functional.pad(x.reshape(-1, width), (0, -width % VECTOR))
    tiles = torch.split(rows, max(1, ALONE // rows.shape[-1]))
    return torch.cat([function(tile) for tile in tiles])[:, :width].reshape(x.shape)


def _linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return in_tiles(x, module.out_features, lambda tile: functional.linear(tile, module.weight, module.bias))


def _conv1d(module: Conv1D, x: torch.Tensor) -> torch.Tensor:
    return in_tiles(x, module.nf, lambda tile: torch.addmm(module.bias, tile, module.weight))
